// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
)

// TestRoleThatCannotStart: in "all", the owner of the CSIStorageCapacity objects cannot be read. The other
// roles work, the process is ready and shows the disabled role, and capacity starts when the cause is fixed.
func TestRoleThatCannotStart(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		forbidden bool // else the pod does not exist
		reason    string
	}{
		"the pod does not exist":     {false, "not found"},
		"no permission to read pods": {true, "is forbidden"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newCapacityEnv(t, getsCapacity)
			e.csiDriver(storagev1.CSIDriverSpec{StorageCapacity: ptr.To(true), AttachRequired: ptr.To(false)})
			class := e.pool("fast", func(c *storagev1.StorageClass) { c.VolumeBindingMode = nil })
			e.pool("late", nil)
			var forbidden atomic.Bool
			forbidden.Store(tt.forbidden)
			if tt.forbidden {
				e.unscheduled("driver-0", nil)
			}
			proxy := kubetest.Proxy(t, e.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if !forbidden.Load() || !strings.HasSuffix(r.URL.Path, "/pods/driver-0") {
					pass.ServeHTTP(w, r)
					return
				}
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(http.StatusForbidden)
				_ = json.NewEncoder(w).Encode(metav1.Status{
					TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Code: http.StatusForbidden,
					Reason: metav1.StatusReasonForbidden, Message: `pods "driver-0" is forbidden`,
				})
			})
			kubeconfig := kubetest.WriteKubeconfig(t, proxy)
			args := []string{"--capacity-ownerref-level=0", "--http-endpoint=127.0.0.1:0", "--kubeconfig=" + kubeconfig}
			cmd := e.publisher("all", args...)
			cmd.Env = append(cmd.Env, "POD_NAME=driver-0")
			p := e.start(cmd)

			e.claim("c", class)
			e.bound("c")
			p.says("Role disabled")
			e.ready(p, "capacity is disabled: ", tt.reason)
			if got := p.disabled("capacity"); !strings.Contains(got, tt.reason) {
				t.Errorf("/statusz shows %q", got)
			}
			e.calls("GetCapacity", 0)
			d := e.diagnose(0, cmd.Env, "--kubeconfig="+kubeconfig, "--capacity-ownerref-level=0")
			d.has("role capacity", finding.Warning, tt.reason)

			if forbidden.Store(false); !tt.forbidden {
				e.unscheduled("driver-0", nil)
			}
			e.published(2)
			p.says("Role enabled")
			status, body := p.get("/readyz?verbose")
			if status != http.StatusOK || strings.Contains(body, "disabled") || p.disabled("capacity") != "" {
				t.Errorf("%d: %s", status, body)
			}
			p.lives()
			e.leftovers("c")
		})
	}
}

// ready waits until /readyz passes and shows all of texts.
func (e *env) ready(p *process, texts ...string) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("it is ready, with %q", texts), func(context.Context) error {
		status, body := p.get("/readyz?verbose")
		for _, text := range texts {
			if status != http.StatusOK || !strings.Contains(body, text) {
				return fmt.Errorf("%d: %s", status, body)
			}
		}
		return nil
	})
}

// disabled returns why a role is disabled according to /statusz.
func (p *process) disabled(role string) string {
	p.t.Helper()
	var page statusz.Page
	_, body := p.get("/statusz?format=json")
	if err := json.Unmarshal([]byte(body), &page); err != nil {
		p.t.Fatal(err)
	}
	for _, r := range page.Roles {
		if r.Name == role {
			return r.Disabled
		}
	}
	p.t.Errorf("there is no role %s in %s", role, body)
	return ""
}
