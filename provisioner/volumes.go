// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// volumeLoop deletes the volumes of released PersistentVolumes.
type volumeLoop struct {
	c       *Controller
	volumes *kube.TermCache[*corev1.PersistentVolume]
	users   volumeUsers
	queue   *workloop.Loop[string]
	// deleted is called with each PersistentVolume that was deleted.
	deleted func(*corev1.PersistentVolume)

	mu       sync.Mutex
	removals map[types.UID]*removal
}

// removal describes the deletion of a PersistentVolume, from its begin to its end.
type removal struct {
	began   time.Time
	blocked time.Time // when an attachment was found first; zero: never
	warned  time.Time // when the last event about that was sent
	volume  bool      // the driver has deleted the volume
	object  bool      // the PersistentVolume is deleted, though other finalizers may keep it
}

func newVolumeLoop(c *Controller, users volumeUsers, deleted func(*corev1.PersistentVolume)) *volumeLoop {
	l := &volumeLoop{c: c, volumes: users.volumes, users: users, deleted: deleted, removals: map[types.UID]*removal{}}
	l.queue = workloop.NewFair(c.loopConfig("volumes"), c.deps.Queues, l.sync, l.groupOf, nil)
	return l
}

// groupOf returns the group of a PersistentVolume, its StorageClass, or "" if it was deleted.
func (l *volumeLoop) groupOf(name string) string {
	pv, ok := l.c.volumes.Get(name)
	if !ok {
		return ""
	}
	return storagehelpers.GetPersistentVolumeClass(pv)
}

// register has the events of PersistentVolumes and VolumeAttachments fill the queue.
func (l *volumeLoop) register(registrations *kube.Registrations) {
	registrations.Add(l.c.volumes.Handle(kube.Handlers[*corev1.PersistentVolume]{
		Add: l.volumeChanged, Update: l.volumeUpdated, Delete: l.volumeDeleted,
	}))
	if l.c.driver.caps.PublishUnpublishVolume {
		registrations.Add(l.c.attachments.Handle(kube.Handlers[*storagev1.VolumeAttachment]{Delete: l.attachmentDeleted}))
	}
}

// volumeChanged does not even enqueue the many PersistentVolumes that are simply in use.
func (l *volumeLoop) volumeChanged(pv *corev1.PersistentVolume) {
	if l.c.driver.decideVolume(pvState{pv: pv}).action != volumeNothing && l.c.driver.responsible(pv) {
		l.queue.Add(pv.Name)
	}
}

func (l *volumeLoop) volumeUpdated(old, pv *corev1.PersistentVolume) {
	l.volumeChanged(pv)
	if isReleased(pv) && !isReleased(old) {
		l.wakeOthers(pv)
	}
}

func (l *volumeLoop) volumeDeleted(pv *corev1.PersistentVolume) {
	l.queue.Forget(pv.Name)
	l.forget(pv.UID)
	l.deleted(pv)
	l.wakeOthers(pv)
}

// wakeOthers enqueues the PersistentVolumes whose deletion waited for pv, because it was for the same volume.
func (l *volumeLoop) wakeOthers(pv *corev1.PersistentVolume) {
	for _, other := range l.users.others(pv) {
		l.volumeChanged(other)
	}
}

// attachmentDeleted wakes a PersistentVolume whose deletion waited for its detachment.
func (l *volumeLoop) attachmentDeleted(va *storagev1.VolumeAttachment) {
	name := va.Spec.Source.PersistentVolumeName
	if name == nil {
		return
	}
	if pv, ok := l.c.volumes.Get(*name); ok {
		l.volumeChanged(pv)
		l.wakeOthers(pv)
	}
}

// sync takes the steps that decideVolume names for one PersistentVolume.
func (l *volumeLoop) sync(ctx context.Context, name string) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("persistentVolume", klog.KRef("", name))
	ctx = klog.NewContext(ctx, log)
	var uid types.UID
	for range maxSteps {
		s := l.gather(name)
		if s.pv == nil && uid != "" { // the Delete event came before the last change of the removal
			l.forget(uid)
		} else if s.pv != nil {
			uid = s.pv.UID
		}
		if s.pv != nil && !l.c.driver.responsible(s.pv) {
			return time.Time{}, nil
		}
		step := l.c.driver.decideVolume(s)
		log.V(2).Info("Decided", "action", step.action, "reason", step.reason)
		switch step.action {
		case volumeNothing:
			return time.Time{}, nil
		case volumeWait:
			return l.waitDetached(s, step.err), workloop.Waiting{}
		}
		traced, end := tracing.StartSpan(tracing.WithOperation(ctx, "Delete", s.pv.UID), string(step.action))
		err := l.apply(traced, s, step)
		end(err)
		if err != nil {
			return time.Time{}, err
		}
	}
	return time.Time{}, fmt.Errorf("PersistentVolume %q: not done after %d steps: %w", name, maxSteps, intent.ErrBug)
}

// attachments returns the VolumeAttachments of the volume of pv that the cache has received; nil if the driver has none.
func (l *volumeLoop) attachments(pv *corev1.PersistentVolume) (found []*storagev1.VolumeAttachment) {
	if !l.c.driver.caps.PublishUnpublishVolume {
		return nil
	}
	for _, of := range append(l.users.others(pv), pv) {
		found = append(found, kube.AttachmentsOf(l.c.attachments, of.Name)...)
	}
	return found
}

func (l *volumeLoop) gather(name string) pvState {
	s := pvState{now: time.Now()}
	pv, ok := l.volumes.Get(name)
	if !ok {
		return s
	}
	s.pv = pv
	if isReleased(pv) {
		s.attachments, s.user = l.attachments(pv), l.users.ofReleased(pv)
	}
	l.mu.Lock()
	if r := l.removals[pv.UID]; r != nil {
		s.removal = *r
	}
	l.mu.Unlock()
	if s.removal.volume && l.c.deps.RemovableFinalizers != nil {
		s.removable = l.c.deps.RemovableFinalizers(pv)
	}
	return s
}

// record changes the removal of a PersistentVolume.
func (l *volumeLoop) record(pv *corev1.PersistentVolume, change func(*removal)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.removals[pv.UID]
	if r == nil {
		r = &removal{began: time.Now()}
		l.removals[pv.UID] = r
	}
	change(r)
}

func (l *volumeLoop) forget(pv types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.removals, pv)
}

// blockedWarning bounds the delay of a deletion by an attachment before an event is sent;
// detaching usually takes a while.
const blockedWarning = time.Minute

// waitDetached returns when to send the next event; the detachment itself ends the wait.
func (l *volumeLoop) waitDetached(s pvState, err error) time.Time {
	l.record(s.pv, func(r *removal) {
		if r.blocked.IsZero() {
			r.blocked, r.warned = s.now, s.now
		}
		if s.now.Sub(r.warned) >= blockedWarning {
			r.warned = s.now
			blocked := s.now.Sub(r.blocked).Round(time.Second)
			l.c.event(s.pv, failedDeleteEvent(fmt.Errorf("%w after %v; waiting for detach before deleting the volume", err, blocked)))
		}
	})
	return s.now.Add(blockedWarning)
}

// responsible reports whether pv belongs to the driver, also if a user created it, and to this node.
func (d driver) responsible(pv *corev1.PersistentVolume) bool {
	by, provisioned := pv.Annotations[storagehelpers.AnnDynamicallyProvisioned]
	to := pv.Annotations[storagehelpers.AnnMigratedTo]
	switch {
	case provisioned && !d.is(by) && !d.is(to),
		!provisioned && pv.Spec.CSI != nil && !d.is(pv.Spec.CSI.Driver),
		!provisioned && pv.Spec.CSI == nil && !d.is(to):
		return false
	}
	return d.reaches(pv)
}

// reaches reports whether the volume of pv is accessible from this node. In distributed
// provisioning every instance handles volumes without node affinity.
func (d driver) reaches(pv *corev1.PersistentVolume) bool {
	if !d.NodeDeployment || len(d.segments) == 0 {
		return true
	}
	if translated, err := d.asCSI(pv); err == nil { // topology keys are translated too
		pv = translated
	}
	return storagehelpers.CheckNodeAffinity(pv, d.segments) == nil
}
