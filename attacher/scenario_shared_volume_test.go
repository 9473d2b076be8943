// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package attacher

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// ofSecondVolume returns a change that makes an attachment one of PersistentVolume pv2, which has the volume of pv1.
func (f *fixture) ofSecondVolume(first *corev1.PersistentVolume) func(*storagev1.VolumeAttachment) {
	f.Helper()
	f.volume(func(pv *corev1.PersistentVolume) { pv.Name, pv.Spec = f.Unique("pv2"), *first.Spec.DeepCopy() })
	return f.ofVolume("pv2")
}

func seldom(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour }

// Two VolumeAttachments are for one volume and node ID.
func TestAttacherScenarioSharedVolume(t *testing.T) {
	for name, second := range map[string]func(*fixture, *corev1.PersistentVolume) func(*storagev1.VolumeAttachment){
		"two_volumes": (*fixture).ofSecondVolume,
		"inline": func(_ *fixture, pv *corev1.PersistentVolume) func(*storagev1.VolumeAttachment) {
			return func(va *storagev1.VolumeAttachment) {
				va.Spec.Source = storagev1.VolumeAttachmentSource{InlineVolumeSpec: &corev1.PersistentVolumeSpec{
					AccessModes: pv.Spec.AccessModes, PersistentVolumeSource: pv.Spec.PersistentVolumeSource,
				}}
			}
		},
		"two_names_of_a_node": func(f *fixture, _ *corev1.PersistentVolume) func(*storagev1.VolumeAttachment) {
			return f.otherNode("id-1")
		},
	} {
		t.Run("detach_of_one_"+name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			f.node("id-1")
			pv := f.volume(withModes(rwx))
			f.attach("va1", nil)
			f.until("is attached", isAttached)
			f.attach("va2", second(f, pv))
			f.untilOf("va2", "is attached", isAttached)
			f.detach("va1")
			f.until("is deleted", isDeleted)
			f.sent("Publish id-1, Publish id-1")
			f.detach("va2")
			f.untilOf("va2", "is deleted", isDeleted)
			f.sent("Publish id-1, Publish id-1, Unpublish id-1")
			f.nothingIsPublished()
		})
	}
	t.Run("detach_of_both", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.node("id-1")
		pv := f.volume(nil)
		f.attach("va1", nil)
		f.attach("va2", f.ofSecondVolume(pv))
		f.until("is attached", isAttached)
		f.untilOf("va2", "is attached", isAttached)
		f.detach("va1")
		f.detach("va2")
		f.until("is deleted", isDeleted)
		f.untilOf("va2", "is deleted", isDeleted)
		f.nothingIsPublished()
	})
	t.Run("detach_of_one_with_a_stale_cache", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		var reads atomic.Int32
		f.through(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/"+f.Unique("va2")) {
				if reads.Add(1) == 1 {
					refuse(w)
					return
				}
				f.deleteByForce(f.Unique("va2"), 0) // the cache shows it as it was before
			}
			pass.ServeHTTP(w, r)
		})
		f.node("id-1")
		pv := f.volume(nil)
		f.attach("va1", nil)
		f.attach("va2", f.ofSecondVolume(pv))
		f.until("is attached", isAttached)
		f.untilOf("va2", "is attached", isAttached)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		f.sent("Publish id-1, Publish id-1, Unpublish id-1")
		if reads.Load() != 2 {
			t.Errorf("%d reads of va2, want 2", reads.Load())
		}
	})
	t.Run("attach_of_one_after_the_detach_of_the_other", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, seldom)
		f.Plugin.Next(unpublish, csitest.DoAndFail(codes.DeadlineExceeded, "slow"))
		f.node("id-1")
		pv := f.volume(nil)
		f.attach("va1", nil)
		f.until("is attached", isAttached)
		f.detach("va1")
		f.until("has failed", detachError("slow"))
		f.attach("va2", f.ofSecondVolume(pv))
		f.untilOf("va2", "waits", attachError(f.Unique("va1")))
		f.patchAttachment("va1", `{"metadata":{"labels":{"a":"b"}}}`)
		f.until("is deleted", isDeleted)
		f.untilOf("va2", "is attached without waiting for its back-off", isAttached)
		f.sent("Publish id-1, Unpublish id-1, Unpublish id-1, Publish id-1")
		if f.Plugin.Publications() != 1 {
			t.Error("the volume is not published")
		}
	})
	t.Run("undo_of_one", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, seldom)
		f.Plugin.Next(publish, csitest.DoAndFail(codes.DeadlineExceeded, "slow"))
		f.node("id-1")
		pv := f.volume(nil)
		f.attach("va1", nil)
		va := f.until("was published", attachError("slow"))
		f.attach("va2", f.ofSecondVolume(pv))
		f.untilOf("va2", "is attached", isAttached)
		f.patchAttachment("va1", `{"metadata":{"finalizers":null}}`)
		f.detach("va1")
		f.until("is deleted", isDeleted)
		f.settles()
		if term := f.c.term.Load(); term.publications.of(va.UID) != nil {
			_, err := term.sync(t.Context(), keyOf(va))
			f.Must(err)
		}
		f.Calls(unpublish, 0)
	})
}
