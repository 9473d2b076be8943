// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// deleteOptions returns the options in the body or the query.
func (c *call) deleteOptions() (metav1.DeleteOptions, error) {
	var o metav1.DeleteOptions
	var err error
	if len(c.Body) > 0 {
		err = decodeInto(c.contentType, c.Body, &o)
	} else {
		err = metav1.Convert_url_Values_To_v1_DeleteOptions(&c.query, &o, nil)
	}
	if err != nil {
		return o, apierrors.NewBadRequest(err.Error())
	}
	return o, nil
}

// delete deletes an object, or marks it as deleted while it has finalizers or a grace period.
func (s *Server) delete(c *call) (int, runtime.Object, error) {
	o, err := c.deleteOptions()
	if err != nil {
		return 0, nil, err
	}
	existing, ok := s.objects[c.res][c.key()]
	if !ok {
		return 0, nil, c.notFound()
	}
	obj, err := s.remove(c, existing, o)
	return http.StatusOK, obj, err
}

// deleteCollection deletes the objects that a list returns.
func (s *Server) deleteCollection(c *call) (int, runtime.Object, error) {
	o, err := c.deleteOptions()
	if err != nil {
		return 0, nil, err
	}
	options, err := c.listOptions()
	if err != nil {
		return 0, nil, err
	}
	match, err := c.matcher(options)
	if err != nil {
		return 0, nil, err
	}
	var items []runtime.Object
	for _, key := range sortedKeys(s.objects[c.res]) {
		obj := s.objects[c.res][key]
		if !match(obj) {
			continue
		}
		one := *c
		one.Name, one.Namespace = accessor(obj).GetName(), accessor(obj).GetNamespace()
		if _, err := s.remove(&one, obj, *o.DeepCopy()); err != nil {
			return 0, nil, err
		}
		items = append(items, obj)
	}
	return http.StatusOK, c.res.listOf(metav1.ListMeta{ResourceVersion: fmt.Sprint(s.version)}, items), nil
}

// remove deletes existing and returns the object of the response.
func (s *Server) remove(c *call, existing runtime.Object, o metav1.DeleteOptions) (runtime.Object, error) {
	if err := c.checkPreconditions(existing, o.Preconditions); err != nil {
		return nil, err
	}
	if slices.Contains(o.DryRun, metav1.DryRunAll) {
		c.query.Set("dryRun", metav1.DryRunAll)
	}
	if c.res.kind == "Namespace" {
		return s.terminate(c, existing)
	}
	obj := existing.DeepCopyObject()
	m := accessor(obj)
	m.SetFinalizers(gcFinalizers(m.GetFinalizers(), o))
	period, graceful, pending := int64(0), false, false
	if pod, ok := obj.(*corev1.Pod); ok {
		period, graceful, pending = gracePeriod(pod, o.GracePeriodSeconds)
	}
	switch {
	case pending:
		return existing, nil
	case graceful:
		s.clock.markGraceful(m, period)
		stored := s.update(c, existing, obj)
		if len(m.GetFinalizers()) > 0 || period > 0 {
			return stored, nil
		}
		existing = stored
	case len(m.GetFinalizers()) > 0:
		s.clock.markDeleted(m)
		return s.update(c, existing, obj), nil
	}
	if !c.dryRun() {
		existing = s.commit(c.res, c.key(), existing, nil)
	}
	if c.res.returnsDeleted {
		return existing, nil
	}
	group := c.res.gvr.GroupResource()
	status := &metav1.Status{Status: metav1.StatusSuccess, Details: &metav1.StatusDetails{
		Name: c.Name, Group: group.Group, Kind: group.Resource, UID: m.GetUID(),
	}}
	status.Kind, status.APIVersion = "Status", "v1"
	return status, nil
}

// update stores obj unless it equals existing.
func (s *Server) update(c *call, existing, obj runtime.Object) runtime.Object {
	switch {
	case c.res.equal(existing, obj):
		return existing
	case c.dryRun():
		return obj
	}
	return s.commit(c.res, c.key(), existing, obj)
}

// checkPreconditions returns a conflict if existing does not fulfil p.
func (c *call) checkPreconditions(existing runtime.Object, p *metav1.Preconditions) error {
	if p == nil {
		return nil
	}
	m := accessor(existing)
	kind := schema.GroupResource{Group: c.res.gvr.Group, Resource: c.res.kind}
	if p.UID != nil && *p.UID != m.GetUID() {
		return apierrors.NewConflict(kind, c.Name, fmt.Errorf("the UID in the precondition (%s) does not match the UID in record (%s). "+
			"The object might have been deleted and then recreated", *p.UID, m.GetUID()))
	}
	if p.ResourceVersion != nil && *p.ResourceVersion != m.GetResourceVersion() {
		return apierrors.NewConflict(kind, c.Name, fmt.Errorf("the ResourceVersion in the precondition (%s) does not match the "+
			"ResourceVersion in record (%s). The object might have been modified", *p.ResourceVersion, m.GetResourceVersion()))
	}
	return nil
}

// gcFinalizers returns finalizers with those that the garbage collector removes for the propagation policy.
func gcFinalizers(finalizers []string, o metav1.DeleteOptions) []string {
	orphan := slices.Contains(finalizers, metav1.FinalizerOrphanDependents)
	foreground := slices.Contains(finalizers, metav1.FinalizerDeleteDependents)
	if policy := o.PropagationPolicy; policy != nil {
		orphan, foreground = *policy == metav1.DeletePropagationOrphan, *policy == metav1.DeletePropagationForeground
	}
	kept := slices.DeleteFunc(slices.Clone(finalizers), func(f string) bool {
		return f == metav1.FinalizerOrphanDependents || f == metav1.FinalizerDeleteDependents
	})
	if orphan {
		kept = append(kept, metav1.FinalizerOrphanDependents)
	}
	if foreground {
		kept = append(kept, metav1.FinalizerDeleteDependents)
	}
	return kept
}

// gracePeriod returns the grace period of pod, and whether it is being deleted within an earlier one.
func gracePeriod(pod *corev1.Pod, asked *int64) (period int64, graceful, pending bool) {
	if pod.DeletionTimestamp != nil {
		have := pod.DeletionGracePeriodSeconds
		if have == nil || *have == 0 {
			return 0, false, false
		}
		if asked == nil || max(*asked, 0) >= *have {
			return 0, false, true
		}
		return max(*asked, 0), true, false
	}
	switch {
	case pod.Spec.NodeName == "" || pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded:
	case asked != nil:
		period = *asked
	case pod.Spec.TerminationGracePeriodSeconds != nil:
		period = *pod.Spec.TerminationGracePeriodSeconds
	}
	if period < 0 {
		period = 1
	}
	return period, true, false
}

// markGraceful marks an object as deleted with a grace period, or shortens that.
func (c *clock) markGraceful(m metav1.Object, period int64) {
	end := metav1.NewTime(c.now().Add(time.Duration(period) * time.Second))
	if at := m.GetDeletionTimestamp(); at != nil {
		end = metav1.NewTime(at.Add(time.Duration(period-*m.GetDeletionGracePeriodSeconds()) * time.Second))
		if t := c.now(); end.Before(&t) {
			end, period = t, min(period, 1)
		}
	} else if m.GetGeneration() > 0 {
		m.SetGeneration(m.GetGeneration() + 1)
	}
	m.SetDeletionTimestamp(&end)
	m.SetDeletionGracePeriodSeconds(&period)
}

// markDeleted marks an object with finalizers as deleted.
func (c *clock) markDeleted(m metav1.Object) {
	if m.GetDeletionTimestamp() == nil && m.GetGeneration() > 0 {
		m.SetGeneration(m.GetGeneration() + 1)
	}
	if t := c.now(); m.GetDeletionTimestamp() == nil || m.GetDeletionTimestamp().After(t.Time) {
		m.SetDeletionTimestamp(&t)
	}
	m.SetDeletionGracePeriodSeconds(new(int64))
}

// terminate marks a Namespace as deleted, and deletes it when it has no finalizers.
func (s *Server) terminate(c *call, existing runtime.Object) (runtime.Object, error) {
	ns := existing.DeepCopyObject().(*corev1.Namespace)
	switch {
	case ns.DeletionTimestamp == nil:
		t := s.clock.now()
		ns.DeletionTimestamp, ns.Status.Phase = &t, corev1.NamespaceTerminating
		return s.update(c, existing, ns), nil
	case len(ns.Spec.Finalizers)+len(ns.Finalizers) > 0 || c.dryRun():
		return existing, nil
	}
	return s.commit(c.res, c.key(), existing, nil), nil
}
