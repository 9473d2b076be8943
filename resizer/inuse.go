// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"context"
	"fmt"
	"slices"
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
	resource string
	synced   func() bool
	// inUse reports whether the volume with that name, of that claim, is in use.
	inUse func(volume, claim string) bool
	// handle registers the handlers that end the wait of claims.
	handle func(*term) (kube.Registration, error)
}

// newUsers requests the informer of what uses volumes.
func (c *Controller) newUsers() *users {
	informers := c.deps.Informers.IfAllowed()
	if c.driver.publishes {
		attachments := informers.Attachments()
		return &users{
			resource: "volumeattachments", synced: attachments.Synced,
			inUse: func(volume, _ string) bool { return len(kube.AttachmentsOf(attachments, volume)) > 0 },
			handle: func(t *term) (kube.Registration, error) {
				return attachments.Handle(kube.Handlers[*storagev1.VolumeAttachment]{Delete: t.attachmentDeleted})
			},
		}
	}
	pods := informers.Pods()
	return &users{
		resource: "pods", synced: pods.Synced,
		inUse: func(_, claim string) bool {
			return slices.ContainsFunc(pods.ByIndex(kube.ByClaim, claim), func(pod *corev1.Pod) bool { return !isTerminated(pod) })
		},
		handle: func(t *term) (kube.Registration, error) { return pods.Handle(t.podHandlers()) },
	}
}

// usersLimit bounds the wait for the first list.
const usersLimit = 30 * time.Second

// watchUsers starts the watch, and returns when its first list is complete or forbidden.
func (t *term) watchUsers(ctx context.Context) error {
	t.c.usersWatched.Do(func() {
		t.c.users.Store(t.c.newUsers())
		t.c.deps.Informers.StartLate()
	})
	users := t.c.users.Load()
	t.handleUsers(users)
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, usersLimit, true,
		func(context.Context) (bool, error) { return t.c.isListed(users), nil })
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("listing %s: the API server did not respond within %v", users.resource, usersLimit)
	}
	return nil
}

// isListed reports whether the first list of u is complete or forbidden.
func (c *Controller) isListed(u *users) bool {
	return u.synced() || c.deps.Informers.Forbidden()[u.resource] != nil
}

// handleUsers registers the handlers, once per term.
func (t *term) handleUsers(u *users) {
	t.usersHandled.Do(func() { t.registrations.AddUnawaited(u.handle(t)) })
}

// usageOf reports whether the volume of the claim of k is in use.
func (t *term) usageOf(k key, volume string) usage {
	users := t.c.users.Load()
	switch {
	case t.c.driver.inUse == inUseNeverWaits:
		return usageUnused
	case users == nil || !t.c.isListed(users):
		return usageUnknown
	case users.inUse(volume, k.claim()):
		return usageInUse
	}
	return usageUnused
}

// isInUse reports whether the volume is still in use: the end of the use looks for the stage, which was stored after the use was
// gathered. It sends the event of the first wait.
func (a *attempt) isInUse(s claimState) bool {
	if a.t.usageOf(a.key, s.volume.Name) != usageInUse {
		return false
	}
	if !s.call.Payload.waiting {
		a.remember(0, func(m *operationMemory) { m.waiting = true })
		a.t.event(s.claim, inUseEvent(s.claim, a.t.c.driver.name))
	}
	return true
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
	for _, k := range t.inStage(stageInUse) {
		if k.claim() == claim {
			t.queue.Add(k)
		}
	}
}
