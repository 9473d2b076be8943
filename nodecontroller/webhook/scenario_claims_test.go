// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestNodecontrollerScenarioWebhookOperations(t *testing.T) {
	t.Run("080_claims", func(t *testing.T) {
		f := scenario(t, nil)
		class := f.class("ours", "dc1")
		theirs := f.class("theirs", "", foreign)
		finalizers := func(pvc *corev1.PersistentVolumeClaim) string { return fmt.Sprint(pvc.Finalizers) }
		const none, ours = "[kubernetes.io/pvc-protection]", "[kubernetes.io/pvc-protection topolvm.io/pvc]"
		with := func(pvc *corev1.PersistentVolumeClaim) { pvc.Finalizers = []string{"topolvm.io/pvc", "x/y"} }
		for name, c := range map[string]struct {
			class *string
			want  string
		}{
			"ours": {&class, ours}, "theirs": {&theirs, none}, "empty": {ptr.To(""), none}, "missing": {ptr.To(f.ns + "-nothing"), none},
		} {
			if got := finalizers(f.newClaim(name, c.class, "1Gi")); got != c.want {
				t.Errorf("%s: finalizers %s, want %s", name, got, c.want)
			}
		}
		if got := finalizers(f.newClaim("has", &class, "1Gi", with)); got != "[topolvm.io/pvc x/y kubernetes.io/pvc-protection]" {
			t.Errorf("it was there already: %s", got)
		}
		withDefault.Lock()
		got := finalizers(f.newClaim("nil", nil, "1Gi"))
		withDefault.Unlock()
		if got != none {
			t.Errorf("without a class: %s", got)
		}
		// A class that the watch has not told of yet.
		late := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: f.ns + "-late"}, Provisioner: f.cfg.Driver}
		_, err := f.client.StorageV1().StorageClasses().Create(t.Context(), late, metav1.CreateOptions{})
		f.must(err)
		if got := finalizers(f.newClaim("late", &late.Name, "1Gi")); got != ours {
			t.Errorf("with a new class: %s", got)
		}
		off := setup(t, func(g *fixture) { g.cfg.Driver, g.cfg.ClaimFinalizer = f.cfg.Driver, "" })
		off.configure(nil)
		if got := finalizers(off.newClaim("off", &class, "1Gi")); got != none {
			t.Errorf("mode off: %s", got)
		}
		if n := off.metric("storage_controller_webhook_requests_total", "path", "/pvc/mutate", "result", "allowed"); n != 1 {
			t.Errorf("mode off: %v answers, want 1", n)
		}
	})
	t.Run("084_drains", func(t *testing.T) {
		t.Parallel()
		held, released := make(chan struct{}), make(chan struct{})
		release := sync.OnceFunc(func() { close(released) })
		defer release() // else a failure would be one of the clean-up, too
		f := setup(t, func(f *fixture) {
			f.cfg.ShutdownDelay = 5 * time.Second
			f.hook = func(s *Server) {
				s.mutations["/pvc/mutate"] = mutation{"persistentvolumeclaims", func(context.Context, *request) (verdict, error) {
					close(held)
					<-released
					return verdict{}, nil
				}}
			}
		})
		f.eventually("it is ready", func(context.Context) error { return f.s.Ready() })
		answered := make(chan int, 1)
		go func() {
			code, _ := f.post("/pvc/mutate", "application/json", reviewOf(t, f.ns, "persistentvolumeclaims", map[string]any{}))
			answered <- code
		}()
		<-held
		ended := make(chan struct{})
		go func() {
			f.stop()
			close(ended)
		}()
		f.eventually("it is not ready", func(context.Context) error {
			if f.s.Ready() == nil {
				return errors.New("it is")
			}
			return nil
		})
		// API servers that have not noticed are still served.
		if code, body := f.post("/pod/mutate", "application/json", reviewOf(t, f.ns, "pods", podOf("p"))); code != 200 {
			t.Errorf("%d %s", code, body)
		}
		f.eventually("it takes no more requests", func(context.Context) error {
			if err := f.dial(); err == nil {
				return errors.New("it does")
			}
			return nil
		})
		select {
		case <-ended:
			t.Error("it ended before its last answer")
		default:
		}
		release()
		if code := <-answered; code != 200 {
			t.Errorf("%d", code)
		}
		<-ended
	})
}
