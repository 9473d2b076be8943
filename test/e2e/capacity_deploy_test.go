// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// inForce waits until a ServiceAccount has what was granted: the API server sees new rules a
// moment later.
func (e *env) inForce(account string, granted map[permission]bool) {
	e.t.Helper()
	for p, anyName := range granted {
		if !anyName {
			continue
		}
		resource, subresource, _ := strings.Cut(p.resource, "/")
		e.eventually(fmt.Sprintf("%v is in force", p), func(ctx context.Context) error {
			review, err := e.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
				Spec: authorizationv1.SubjectAccessReviewSpec{User: "system:serviceaccount:" + e.ns + ":" + account,
					ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: e.ns, Verb: p.verb, Group: p.group,
						Resource: resource, Subresource: subresource}},
			}, metav1.CreateOptions{})
			if err == nil && !review.Status.Allowed {
				err = errors.New(review.Status.Reason)
			}
			return err
		})
	}
}

// contained starts the program as a container of a shipped pod, with further flags: in the namespace of e, on the
// first node, and as the ServiceAccount of kubeconfig.
func (e *env) contained(c corev1.Container, kubeconfig, pod string, args ...string) *process {
	e.t.Helper()
	cmd := e.command(c.Args[0], slices.Concat(c.Args[1:], quick, []string{
		"--csi-address", e.plugin.Address(), "--kubeconfig", kubeconfig, "--http-endpoint=127.0.0.1:0",
	}, args)...)
	fields := map[string]string{"metadata.namespace": e.ns, "metadata.name": pod, "spec.nodeName": e.nodes[0]}
	for _, v := range c.Env {
		value, known := v.Value, true
		if v.ValueFrom != nil {
			value, known = fields[v.ValueFrom.FieldRef.FieldPath]
		}
		if !known {
			e.t.Fatalf("container %s: unknown field of %s", c.Name, v.Name)
		}
		cmd.Env = append(cmd.Env, v.Name+"="+value)
	}
	p := e.start(cmd)
	p.pod = pod
	return p
}

func controlledBy(kind string, o metav1.Object) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: o.GetName(), UID: o.GetUID(), Controller: ptr.To(true)}}
}

// ownedBy waits until there are n objects and fails the test unless owner, of this kind, is
// the only owner of each.
func (e *env) ownedBy(n int, kind string, owner metav1.Object) {
	e.t.Helper()
	for _, o := range e.published(n) {
		if len(o.OwnerReferences) != 1 || o.OwnerReferences[0].Kind != kind || o.OwnerReferences[0].UID != owner.GetUID() {
			e.t.Errorf("the owners of %q are %v", o.Name, o.OwnerReferences)
		}
	}
}

// capacityIs has the driver say so, and waits until the objects do. An update of the class
// has it asked at once.
func (e *env) capacityIs(size, class string) {
	e.t.Helper()
	want := resource.MustParse(size)
	e.plugin.Always("GetCapacity", csitest.Alter(func(r *csi.GetCapacityResponse) { r.AvailableCapacity = want.Value() }))
	patch := []byte(`{"metadata":{"annotations":{"changed":"yes"}}}`)
	if _, err := e.client.StorageV1().StorageClasses().Patch(e.t.Context(), class, types.MergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		e.t.Fatal(err)
	}
	e.eventually("the objects say what the driver has", func(context.Context) error {
		for _, o := range e.capacities() {
			if o.Capacity.Cmp(want) != 0 {
				return fmt.Errorf("%q says %v", o.Name, o.Capacity)
			}
		}
		return nil
	})
}

func (e *env) deleteClass(name string) {
	e.t.Helper()
	if err := e.client.StorageV1().StorageClasses().Delete(e.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		e.t.Fatal(err)
	}
}

// deploymentWithPod makes a Deployment and its pod NAME-1-x, as the controllers make it, which
// do not run here.
func (e *env) deploymentWithPod(name string) *appsv1.Deployment {
	e.t.Helper()
	selector := &metav1.LabelSelector{MatchLabels: map[string]string{"app": "c"}}
	template := corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: selector.MatchLabels},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}}},
	}
	deployment, err := e.client.AppsV1().Deployments(e.ns).Create(e.t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DeploymentSpec{Selector: selector, Template: template},
	}, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	set, err := e.client.AppsV1().ReplicaSets(e.ns).Create(e.t.Context(), &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: name + "-1", OwnerReferences: controlledBy("Deployment", deployment)},
		Spec:       appsv1.ReplicaSetSpec{Selector: selector, Template: template},
	}, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	e.unscheduled(name+"-1-x", controlledBy("ReplicaSet", set))
	return deployment
}

// daemonSetWithPod does so for a DaemonSet, whose pod is NAME-x.
func (e *env) daemonSetWithPod(name string) *appsv1.DaemonSet {
	e.t.Helper()
	set, err := e.client.AppsV1().DaemonSets(e.ns).Create(e.t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "c"}},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "c"}},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "none"}}},
			}},
	}, metav1.CreateOptions{})
	e.must(err)
	e.unscheduled(name+"-x", controlledBy("DaemonSet", set))
	return set
}

// capacityAlone is values of the chart.
const capacityAlone = "mode: per-role\nprovisioner: {enabled: false}\nattacher: {enabled: false}\nresizer: {enabled: false}\n" +
	"snapshotter: {enabled: false}\nsecrets: {enabled: false}"

// TestCapacityNeedsWhatItsManifestsGrant runs the container of the chart as the
// ServiceAccount of deploy/rbac: it is refused nothing, and nothing is granted that it does
// not use.
func TestCapacityNeedsWhatItsManifestsGrant(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{Controller: getsCapacity, Segments: twoZones}, 2)
	granted := e.applyRBAC("capacity*")
	e.inForce("csi-provisioner", granted)
	kubeconfig, used, refused := e.as("csi-provisioner")
	class := e.pool("fast", nil)
	deployment := e.deploymentWithPod("csi-capacity")
	p := e.contained(podOf(t, charted(t, capacityAlone)).Containers[0], kubeconfig, "csi-capacity-1-x")
	e.ownedBy(2, "Deployment", deployment)
	e.leads(p, e.provisionerLease()+"-capacity")
	e.capacityIs("3Gi", class)
	e.deleteClass(class)
	e.published(0)
	e.usesAll(granted, used, refused, func(p permission) bool {
		// Of a server that cannot send it with the watch; of a second event of one text.
		return p.verb == "list" || p == permission{"patch", "", "events"}
	})
}
