package webhook

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// A class, a claim and a pod that are applied together: the pod counts though the cache
// does not have the class yet, and each class is asked for once.
func TestClassNewerThanTheCache(t *testing.T) {
	t.Parallel()
	held, gets := &gate{}, &atomic.Int64{}
	f := setup(t, func(f *fixture) {
		f.watch = held.before(t, f.cp.Config(), "/storageclasses")
		f.api = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if strings.Contains(r.URL.Path, "/storageclasses/") {
				gets.Add(1)
			}
			pass.ServeHTTP(w, r)
		})
	})
	held.shut()
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: f.ns + "-late"}, Provisioner: f.cfg.Driver, Parameters: map[string]string{f.cfg.DeviceClassParameter: "dc1"}}
	classes := f.client.StorageV1().StorageClasses()
	_, err := classes.Create(t.Context(), class, metav1.CreateOptions{})
	f.must(err)
	f.Cleanup(func() {
		_ = classes.Delete(context.WithoutCancel(t.Context()), class.Name, metav1.DeleteOptions{}) // the control plane ends soon anyway
	})
	f.newClaim("a", &class.Name, "1Gi")
	f.newClaim("b", &class.Name, "1Gi")
	none := f.ns + "-none"
	f.newClaim("c", &none, "1Gi")
	f.sized("claims of a new class, and of none", 2, "a", "b", "c")
	if n := gets.Load(); n != 2 {
		t.Errorf("%d reads of classes, want one of each of two", n)
	}
	if _, ok := f.s.deps.Classes.Get(class.Name); ok {
		t.Error("the watch was not held back: nothing was tested")
	}
}
