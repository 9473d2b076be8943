// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// users watches what uses volumes, from the first time that an expansion depends on it: the
// VolumeAttachments of a driver that publishes volumes, else the Pods. A missing permission means that no
// volume is in use. The watch lasts until the process exits.
type users struct {
	mu          sync.Mutex
	watched     bool
	attachments kube.Informer[*storagev1.VolumeAttachment]
	pods        kube.Informer[*corev1.Pod]
}

// usersLimit bounds the wait for the first list.
const usersLimit = 30 * time.Second

// watchUsers starts the watch, and returns when its first list is complete or forbidden.
func (t *term) watchUsers(ctx context.Context) error {
	t.c.users.mu.Lock()
	if !t.c.users.watched {
		if t.c.driver.publishes {
			t.c.users.attachments = t.c.deps.Informers.IfAllowed().Attachments()
		} else {
			t.c.users.pods = t.c.deps.Informers.IfAllowed().Pods()
		}
		t.c.users.watched = true
		t.c.deps.Informers.StartLate()
	}
	t.c.users.mu.Unlock()
	t.handleUsers()
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, usersLimit, true,
		func(context.Context) (bool, error) { return t.usersListed(), nil })
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("listing %s: the API server did not respond within %v", t.usersResource(), usersLimit)
	}
	return nil
}

// usersListed reports whether the first list is complete or forbidden.
func (t *term) usersListed() bool {
	synced := t.c.users.pods.Synced
	if t.c.driver.publishes {
		synced = t.c.users.attachments.Synced
	}
	return synced() || t.c.deps.Informers.Forbidden()[t.usersResource()] != nil
}

// usersResource returns the resource that uses volumes.
func (t *term) usersResource() string {
	if t.c.driver.publishes {
		return "volumeattachments"
	}
	return "pods"
}

// handleUsers registers the handlers that end the wait of claims, once per term.
func (t *term) handleUsers() {
	t.usersHandled.Do(func() {
		if t.c.driver.publishes {
			t.registrations.AddUnawaited(t.c.users.attachments.Handle(kube.Handlers[*storagev1.VolumeAttachment]{
				Delete: t.attachmentDeleted,
			}))
			return
		}
		t.registrations.AddUnawaited(t.c.users.pods.Handle(t.podHandlers()))
	})
}

// usageOf reports whether the volume of the claim of k is in use.
func (t *term) usageOf(k key, volume string) usage {
	if t.c.driver.inUse == inUseNeverWaits {
		return usageUnused
	}
	t.c.users.mu.Lock()
	watched := t.c.users.watched
	t.c.users.mu.Unlock()
	switch {
	case !watched || !t.usersListed():
		return usageUnknown
	case t.c.driver.publishes && len(t.c.users.attachments.ByIndex(kube.ByVolume, volume)) > 0:
		return usageInUse
	case t.c.driver.publishes:
		return usageUnused
	}
	for _, pod := range t.c.users.pods.ByIndex(kube.ByClaim, k.claim()) {
		if !isTerminated(pod) {
			return usageInUse
		}
	}
	return usageUnused
}

func isTerminated(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// attachmentDeleted enqueues the claim that waited for the end of the attachment.
func (t *term) attachmentDeleted(va *storagev1.VolumeAttachment) {
	name := va.Spec.Source.PersistentVolumeName
	if name == nil {
		return
	}
	if pv, ok := t.c.volumes.Get(*name); ok && pv.Spec.ClaimRef != nil {
		t.wakeUnused(pv.Spec.ClaimRef.Namespace + "/" + pv.Spec.ClaimRef.Name)
	}
}

// podHandlers returns the handlers that enqueue the claims that wait for a Pod.
func (t *term) podHandlers() kube.Handlers[*corev1.Pod] {
	ended := func(pod *corev1.Pod) {
		for _, claim := range kube.ClaimsOfPod(pod) {
			t.wakeUnused(claim)
		}
	}
	return kube.Handlers[*corev1.Pod]{Delete: ended, Update: func(old, pod *corev1.Pod) {
		if old.UID != pod.UID { // deleted and recreated while the watch was interrupted
			ended(old)
		}
		if isTerminated(pod) {
			ended(pod)
		}
	}}
}

func (t *term) wakeUnused(claim string) {
	for _, k := range t.memories.inStage(stageInUse) {
		if k.claim() == claim {
			t.queue.Add(k)
		}
	}
}
