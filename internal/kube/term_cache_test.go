// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestTermCache: an object is fresh if the cache has reached the beginning of the term, or if this process has read or written it
// since. That memory ends when the cache has reached it.
func TestTermCache(t *testing.T) {
	c := kubetest.Get(t)
	client := c.Client().CoreV1().PersistentVolumes()
	pv := createVolume(t, c, nil)
	informers := informersFor(t, c, c.Client())
	volumes := informers.Volumes()
	ctx, stop := context.WithCancel(t.Context())
	informers.Start(ctx)
	defer informers.Shutdown()
	defer stop()
	kubetest.Eventually(t, "the watch runs", func(context.Context) error { return informers.Synced() })
	const never = "9223372036854775807"
	for latest, reached := range map[string]bool{"": false, "1": true, pv.ResourceVersion: true, never: false} {
		term := NewTermCache(volumes)
		if err := BeginTerm(t.Context(), term, func(context.Context, metav1.ListOptions) (*corev1.PersistentVolumeList, error) {
			return &corev1.PersistentVolumeList{ListMeta: metav1.ListMeta{ResourceVersion: latest}}, nil
		}); err != nil {
			t.Fatal(err)
		}
		annotate := func(value string) error {
			_, err := term.Patch(t.Context(), client, pv, MetadataPatch{SetAnnotations: map[string]string{"n": fmt.Sprint(latest, value)}})
			return err
		}
		read := func() error { _, _, err := term.Refetch(t.Context(), client, pv); return err }
		for _, step := range []struct {
			what    string
			do      func() error
			fresh   bool
			entries int // zero instead for a fresh object of a cache that has reached latest
		}{
			{"before anything", func() error { return nil }, reached, 0},
			{"after a read", read, true, 1},
			{"after a doubt", func() error { term.Doubt(pv); return nil }, false, 1},
			{"after a write", func() error { return annotate("doubted") }, false, 1},
			{"after another read", read, true, 1},
			{"after another write", func() error { return annotate("fresh") }, true, 1},
			{"beside an object that was deleted", func() error {
				deleted := pv.DeepCopy()
				deleted.Name, deleted.UID = "deleted", "deleted"
				term.pruneAt = 2
				term.mark(deleted, true)
				return nil
			}, true, 1},
			{"in a cache that has reached latest", func() error {
				term.latest, reached = "1", true
				return read()
			}, true, 1},
		} {
			if err := step.do(); err != nil {
				t.Fatal(err)
			}
			if seen, fresh, ok := term.Fresh(pv.Name); !ok || seen.UID != pv.UID || fresh != step.fresh {
				t.Errorf("latest %q, %s: the object is fresh: %t", latest, step.what, fresh)
			}
			if reached && step.fresh {
				step.entries = 0
			}
			if len(term.acted) != step.entries {
				t.Errorf("latest %q, %s: %d entries, want %d", latest, step.what, len(term.acted), step.entries)
			}
		}
	}
}

// TestOutdated: only a newer state, or the absence of the object, explains a failed write: by a test, a conflict or a deletion.
func TestOutdated(t *testing.T) {
	c := kubetest.Get(t)
	own := NewMutationCache(informersFor(t, c, c.Client()).Volumes())
	version := func(name, uid, version string) *corev1.PersistentVolume {
		return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid), ResourceVersion: version}}
	}
	deleting := func(pv *corev1.PersistentVolume) *corev1.PersistentVolume {
		pv.DeletionTimestamp, pv.Finalizers = &metav1.Time{}, []string{"example.com/kept"}
		return pv
	}
	own.Observe(version("pv", "u", "2"))
	own.Observe(deleting(version("leaving", "u", "2")))
	invalid := apierrors.NewInvalid(schema.GroupKind{}, "pv", nil) // a finalizer is added, or a policy refuses it
	conflict := apierrors.NewConflict(schema.GroupResource{}, "pv", nil)
	failedTest := &apierrors.StatusError{ErrStatus: metav1.Status{Reason: metav1.StatusReasonInvalid}}
	for what, tt := range map[string]struct {
		obj  *corev1.PersistentVolume
		err  error
		want bool
	}{
		"an older version, a conflict":    {version("pv", "u", "1"), conflict, true},
		"an older version, a failed test": {version("pv", "u", "1"), failedTest, true},
		"an older version, forbidden":     {version("pv", "u", "1"), apierrors.NewForbidden(schema.GroupResource{}, "pv", nil), false},
		"an older version, no error":      {version("pv", "u", "1"), nil, false},
		"an older version, invalid":       {version("pv", "u", "1"), invalid, false},
		"the newest version":              {version("pv", "u", "2"), failedTest, false},
		"an object that is deleted since": {version("leaving", "u", "1"), invalid, true},
		"one that was known to be":        {deleting(version("leaving", "u", "1")), invalid, false},
		"an object that was recreated":    {version("pv", "old", "2"), failedTest, true},
		"an object that was deleted":      {version("gone", "u", "2"), failedTest, true},
	} {
		if got := own.Outdated(tt.obj, tt.err); got != tt.want {
			t.Errorf("%s: %t", what, got)
		}
	}
}
