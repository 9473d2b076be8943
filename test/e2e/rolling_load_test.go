// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// load is the users of a driver, who make claims all the time, attach and detach their
// volumes, and delete a part of them.
type load struct {
	*env
	class string
	// patient means that no claim without a volume is deleted: its volume stays
	// behind when the process that creates it is killed (docs/provisioner.md).
	patient bool

	mu     sync.Mutex
	claims []*usedClaim // in the order of their creation
	ended  bool         // no more claims are created
}

// usedClaim is a claim and what its user does with it.
type usedClaim struct {
	name string
	uid  types.UID
	life []step // steps that remain

	claim      *corev1.PersistentVolumeClaim // nil when there is none
	attachment *storagev1.VolumeAttachment   // nil when there is none
}

// step is something to do or to wait for. It returns whether it is over.
type step func(ctx context.Context, l *load, c *usedClaim) (bool, error)

// lives are what becomes of claims, in turn.
var lives = [][]step{
	{isBound},
	{isBound, attach, isAttached},
	{isBound, attach, isAttached, detach, isDetached, remove, isGone},
	{remove, isGone}, // given up before it is bound, as a rule
}

func isBound(_ context.Context, _ *load, c *usedClaim) (bool, error) {
	return c.claim != nil && c.claim.Status.Phase == corev1.ClaimBound, nil
}

func attach(ctx context.Context, l *load, c *usedClaim) (bool, error) {
	va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: l.ns + "-" + c.name}, Spec: storagev1.VolumeAttachmentSpec{
		Attacher: l.plugin.Name(), NodeName: l.nodes[0],
		Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &c.claim.Spec.VolumeName},
	}}
	_, err := l.client.StorageV1().VolumeAttachments().Create(ctx, va, metav1.CreateOptions{})
	return true, err
}

func isAttached(_ context.Context, _ *load, c *usedClaim) (bool, error) {
	return c.attachment != nil && c.attachment.Status.Attached, nil
}

func detach(ctx context.Context, l *load, c *usedClaim) (bool, error) {
	return true, l.client.StorageV1().VolumeAttachments().Delete(ctx, c.attachment.Name, metav1.DeleteOptions{})
}

func isDetached(_ context.Context, _ *load, c *usedClaim) (bool, error) {
	return c.attachment == nil, nil
}

func remove(ctx context.Context, l *load, c *usedClaim) (bool, error) {
	return true, l.client.CoreV1().PersistentVolumeClaims(l.ns).Delete(ctx, c.name, metav1.DeleteOptions{})
}

func isGone(_ context.Context, _ *load, c *usedClaim) (bool, error) { return c.claim == nil, nil }

// run makes the load until ctx ends.
func (l *load) run(ctx context.Context) {
	pace := time.NewTicker(150 * time.Millisecond)
	defer pace.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-pace.C:
		}
		if err := l.proceed(ctx); err != nil && ctx.Err() == nil {
			l.t.Errorf("the load: %v", err)
			return
		}
	}
}

// proceed creates one claim and performs the next step of all others.
func (l *load) proceed(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended {
		i := len(l.claims)
		life := lives[i%len(lives)]
		if l.patient && i%len(lives) == len(lives)-1 {
			life = lives[0]
		}
		made, err := l.client.CoreV1().PersistentVolumeClaims(l.ns).Create(ctx, newClaim(fmt.Sprint("c", i), l.class),
			metav1.CreateOptions{})
		if err != nil {
			return err
		}
		l.claims = append(l.claims, &usedClaim{name: made.Name, uid: made.UID, life: life})
	}
	if err := l.look(ctx); err != nil {
		return err
	}
	for _, c := range l.claims {
		for len(c.life) > 0 {
			over, err := c.life[0](ctx, l, c)
			if err != nil {
				return fmt.Errorf("claim %s: %w", c.name, err)
			}
			if !over {
				break
			}
			c.life = c.life[1:]
		}
	}
	return nil
}

// look reads how claims and attachments are.
func (l *load) look(ctx context.Context) error {
	claims, err := l.client.CoreV1().PersistentVolumeClaims(l.ns).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	attachments, err := l.attachments(ctx)
	if err != nil {
		return err
	}
	for _, c := range l.claims {
		c.claim, c.attachment = nil, nil
		if i := slices.IndexFunc(claims.Items, func(o corev1.PersistentVolumeClaim) bool { return o.UID == c.uid }); i >= 0 {
			c.claim = &claims.Items[i]
		}
		if i := slices.IndexFunc(attachments, func(o storagev1.VolumeAttachment) bool { return o.Name == l.ns+"-"+c.name }); i >= 0 {
			c.attachment = &attachments[i]
		}
	}
	return nil
}

// end stops the creation of claims and waits until all of them are finished.
func (l *load) end() {
	l.t.Helper()
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.eventually("everybody has what he wanted", func(context.Context) error {
		return l.waiting(func(c *usedClaim) bool { return len(c.life) > 0 })
	})
}

// waiting is an error that names the claims of which is says so.
func (l *load) waiting(is func(*usedClaim) bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, c := range l.claims {
		if is(c) {
			errs = append(errs, fmt.Errorf("%s has %d steps before it", c.name, len(c.life)))
		}
	}
	return errors.Join(errs[:min(len(errs), 10)]...)
}

// left is the claims that there are in the end, and how many of them are attached.
func (l *load) left() (claims []usedClaim, attachments int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.claims {
		if c.claim != nil {
			claims = append(claims, *c)
		}
		if c.attachment != nil {
			attachments++
		}
	}
	return claims, attachments
}
