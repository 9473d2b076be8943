package nodecontroller

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// claimIsDeleted tells whether a claim is gone or on its way.
func (f *fixture) claimIsDeleted(name string) bool {
	pvc, err := f.client.CoreV1().PersistentVolumeClaims(f.ns).Get(f.Context(), name, metav1.GetOptions{})
	return kube.IsNotFound(err) || err == nil && pvc.DeletionTimestamp != nil
}

// refusedClient is one to which the API server refuses one kind of request.
func (f *fixture) refusedClient(method, suffix string) kubernetes.Interface {
	f.Helper()
	client, err := kubernetes.NewForConfig(kubetest.Proxy(f.T, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method == method && strings.HasSuffix(r.URL.Path, suffix) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusForbidden)
			_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","message":"admission webhook denied the request","code":403}`))
			return
		}
		pass.ServeHTTP(w, r)
	}))
	f.must(err)
	return client
}

// TestOneVolumeDoesNotEndTheCommand: whatever is wrong with one volume of the node, the
// others are cleaned up.
func TestOneVolumeDoesNotEndTheCommand(t *testing.T) {
	for name, test := range map[string]struct{ method, suffix, want string }{
		"its claim may not be deleted": {http.MethodDelete, "/persistentvolumeclaims/%", "admission webhook denied the request"},
		"its claim cannot be read":     {http.MethodGet, "/persistentvolumeclaims/%", "admission webhook denied the request"},
		"nothing is wrong":             {"NONE", "%", ""},
	} {
		for _, bad := range []string{"a", "b"} { // whichever has its turn first
			t.Run(name+" "+bad, func(t *testing.T) {
				f := scenario(t, nil)
				f.bound("a", "n")
				f.bound("b", "n")
				var out strings.Builder
				api := f.refusedClient(test.method, strings.ReplaceAll(test.suffix, "%", bad))
				err := Cleanup(t.Context(), f.cfg, api, CleanupRequest{Driver: f.driver, Node: f.name("n"), Yes: true}, &out)
				if (err == nil) != (test.want == "") || err != nil && (!strings.Contains(err.Error(), test.want) || errors.Is(err, ErrRefused)) {
					t.Errorf("got %v\n%s", err, &out)
				}
				for _, pvc := range []string{"a", "b"} {
					if want := test.want == "" || pvc != bad; f.claimIsDeleted(pvc) != want {
						t.Errorf("claim %s is deleted: %t, while %s is bad\n%s", pvc, !want, bad, &out)
					}
				}
			})
		}
	}
}

// TestVolumeThatWentByItself was refused in the plan, and is gone when it has its turn.
func TestVolumeThatWentByItself(t *testing.T) {
	f := scenario(t, nil)
	pv, _ := f.bound("a", "n")
	api := f.recorded()
	c := &cleanup{request: CleanupRequest{Driver: f.driver, Node: f.name("n"), Yes: true, Wait: time.Second}, refused: map[string]bool{}, forced: map[string]bool{}, bucket: bucket{qps: 1, burst: 1}}
	c.policy, c.key, c.fixed = policyOf(f.cfg, f.driver), f.cfg.TopologyNodeKey, true
	c.reader = &reader{client: api, policy: c.policy, timeout: f.cfg.Timeout}
	c.refused[pv.Name] = true
	f.must(f.client.CoreV1().PersistentVolumes().Delete(t.Context(), pv.Name, metav1.DeleteOptions{}))
	f.patchVolume("pv-a", `{"metadata":{"finalizers":null}}`)
	var out strings.Builder
	f.must(c.carryOut(t.Context(), []snapshot{{volume: pv, nodes: []string{f.name("n")}}}, &out))
	if len(c.refused) > 0 {
		t.Errorf("%v are left", c.refused)
	}
}
