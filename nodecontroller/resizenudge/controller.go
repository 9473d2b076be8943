// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizenudge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/claimloop"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// Config holds the settings.
type Config struct {
	claimloop.Settings
	Enabled    bool
	Driver     string
	Annotation string // of pods
}

// Controller updates pods whose file systems must grow.
type Controller struct {
	*claimloop.Loop // nil: disabled
	cfg             Config
	deps            claimloop.Deps
	nudges          *prometheus.CounterVec
	volumes         kube.Informer[*corev1.PersistentVolume]
	classes         kube.Informer[*storagev1.StorageClass]
	// firstSeen is when a claim, by UID, was first seen waiting, if its conditions do not say since when.
	firstSeen sync.Map
}

// New requests the watches, if the controller is enabled.
func New(cfg Config, deps claimloop.Deps) *Controller {
	c := &Controller{cfg: cfg, deps: deps, nudges: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "storage_controller_resize_nudges_total",
		Help: "Pods annotated so that the kubelet grows a file system, by result: ok, gone, conflict, forbidden or error.",
	}, []string{"result"})}
	deps.Registry.MustRegister(c.nudges)
	if !cfg.Enabled {
		return c
	}
	c.volumes, c.classes = deps.Informers.Volumes(), deps.Informers.Classes()
	c.Loop = claimloop.New(claimloop.Config{
		Name: "nodecontroller-resize-nudge", Settings: cfg.Settings, Pods: true,
		Concerns: concerns, Sync: c.sync, Handle: c.handle, Forget: func(uid types.UID) { c.firstSeen.Delete(uid) },
	}, deps)
	return c
}

// Run updates pods until ctx ends, and returns after the last worker has stopped. It may be called again.
func (c *Controller) Run(ctx context.Context) error {
	c.firstSeen.Clear() // another leader may have updated the pods meanwhile
	return c.Loop.Run(ctx)
}

// handle enqueues the claim of a volume that the watch observed after its claim.
func (c *Controller) handle(r *kube.Registrations, enqueue func(claim string)) {
	r.Add(c.volumes.Handle(volumeHandlers(enqueue)))
	r.Add(c.classes.Handle(kube.Handlers[*storagev1.StorageClass]{})) // to wait for the first list
}

// volumeHandlers returns handlers that enqueue the claim of a new volume.
func volumeHandlers(enqueue func(claim string)) kube.Handlers[*corev1.PersistentVolume] {
	added := func(pv *corev1.PersistentVolume) {
		if ref := pv.Spec.ClaimRef; ref != nil {
			enqueue(ref.Namespace + "/" + ref.Name)
		}
	}
	return kube.Handlers[*corev1.PersistentVolume]{Add: added, Update: func(old, pv *corev1.PersistentVolume) {
		if old.UID != pv.UID { // the deletion was not observed
			added(pv)
		}
	}}
}

// sync reconciles one claim.
func (c *Controller) sync(ctx context.Context, t *claimloop.Term, pvc *corev1.PersistentVolumeClaim) (time.Time, error) {
	s := c.gather(t, pvc)
	next := decide(s, c.cfg.Annotation)
	klog.FromContext(ctx).V(2).Info("Decided", "reason", next.reason, "pods", len(next.pods))
	var errs []error
	for _, pod := range next.pods {
		if err := c.update(ctx, t, pod, annotationValue(s.now, s.since)); err != nil {
			errs = append(errs, t.Failed(pvc, "patch on pods",
				fmt.Errorf("annotating a pod for the file system expansion of claim %s: pod %s: %w", pvc.Name, kube.Key(pod), err)))
		}
	}
	return next.again, errors.Join(errs...)
}

// gather reads the caches.
func (c *Controller) gather(t *claimloop.Term, pvc *corev1.PersistentVolumeClaim) claimState {
	s := claimState{claim: pvc, ours: c.isOurs(pvc), since: lastTransition(pvc), now: time.Now()}
	var known bool
	s.pods, known = t.Pods.Of(pvc)
	s.podsUnknown = !known
	if s.since.IsZero() && concerns(pvc) {
		seen, _ := c.firstSeen.LoadOrStore(pvc.UID, s.now)
		s.since, _ = seen.(time.Time)
	}
	return s
}

// isOurs reports whether the volume of pvc belongs to the driver. The StorageClass decides only if the
// volume is not known: the class may have been deleted.
func (c *Controller) isOurs(pvc *corev1.PersistentVolumeClaim) bool {
	if pv, known := c.volumes.Get(pvc.Spec.VolumeName); known {
		return pv.Spec.CSI != nil && pv.Spec.CSI.Driver == c.cfg.Driver
	}
	class, known := c.classes.Get(storagehelpers.GetPersistentVolumeClaimClass(pvc))
	return known && class.Provisioner == c.cfg.Driver
}

// update sets the annotation of pod. The UID in the patch makes it fail for another pod of the name.
func (c *Controller) update(ctx context.Context, t *claimloop.Term, pod *corev1.Pod, value string) error {
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": pod.UID, "annotations": map[string]string{c.cfg.Annotation: value},
	}})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	patched, err := c.deps.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, data, metav1.PatchOptions{})
	replaced := isOtherObject(err)
	if replaced {
		err = apierrors.NewConflict(corev1.Resource("pods"), pod.Name, err)
	}
	c.nudges.WithLabelValues(kube.WriteResult(err)).Inc()
	switch {
	case kube.IsNotFound(err):
		t.Pods.MarkDeleted(pod)
	case err == nil:
		t.Pods.Observe(patched)
		klog.FromContext(ctx).Info("Pod annotated for file system expansion", "pod", klog.KObj(pod))
	case !replaced: // the creation of the new pod is an event of its own
		return err
	}
	return nil
}

// isOtherObject reports whether err means that the UID in a patch was that of another object. The
// API server treats it as an invalid change of the UID.
func isOtherObject(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	return slices.ContainsFunc(status.Status().Details.Causes, func(c metav1.StatusCause) bool { return c.Field == "metadata.uid" })
}
