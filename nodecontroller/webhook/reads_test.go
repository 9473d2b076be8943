// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// reading returns a server and the count of its live reads of claims. The gate holds back what its cache
// observes once it is shut.
func reading(t *testing.T) (*fixture, *atomic.Int64, *gate) {
	t.Parallel()
	reads, held := &atomic.Int64{}, &gate{}
	f := setup(t, func(f *fixture) {
		f.watch = held.before(t, f.cp.Config(), "/persistentvolumeclaims")
		f.api = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if strings.Contains(r.URL.Path, "/persistentvolumeclaims") {
				reads.Add(1)
			}
			pass.ServeHTTP(w, r)
		})
	})
	return f, reads, held
}

// names returns n names with prefix.
func names(prefix string, n int) []string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf("%s-%d", prefix, i))
	}
	return all
}

// sized fails the test unless the patch of a pod with claims says gib GiB of dc1; 0 means no patch.
func (f *fixture) sized(what string, gib int, claims ...string) {
	f.Helper()
	pod := podOf("p")
	for i, c := range claims {
		pod.Spec.Volumes = append(pod.Spec.Volumes, claimVolume(fmt.Sprint("v", i), c))
	}
	patch := string(f.ask("/pod/mutate", "pods", pod).Patch)
	want := fmt.Sprintf(`capacity.topolvm.io~1dc1","value":"%d"`, gib<<30)
	if gib == 0 && patch != "" || gib > 0 && !strings.Contains(patch, want) {
		f.Errorf("%s: %s, want %d GiB", what, patch, gib)
	}
}

// TestReads counts the live reads for claims that are cached, missing, newer than the cache and bound by now.
func TestReads(t *testing.T) {
	f, reads, held := reading(t)
	class := f.class("dc1", "dc1")
	cached := names("cached", 3*maxReads+1)
	for _, name := range cached {
		f.claim(name, class, "1Gi")
	}
	held.shut()
	created := names("created", 5)
	for _, name := range created {
		f.newClaim(name, &class, "2Gi")
	}
	everything := slices.Concat(names("missing", 6), cached, created)
	for _, c := range []struct {
		what   string
		gib    int
		reads  int64
		claims []string
	}{
		{"cached claims are confirmed", 31, 31, cached},
		{"missing claims", 0, 11, names("missing", 11)},
		{"claims of all kinds are read once each", 41, 42, everything},
		{"too many claims", 0, 0, names("many", maxClaims+1)},
	} {
		f.sized(c.what, c.gib, c.claims...)
		if n := reads.Swap(0); n != c.reads {
			t.Errorf("%s: %d live reads, want %d", c.what, n, c.reads)
		}
	}
	f.bind(cached[4])
	f.sized("a claim that is bound but not in the cache", 0, everything...)
	_, ok := f.s.deps.Claims.Get(f.ns + "/" + created[0])
	if claim, _ := f.s.deps.Claims.Get(f.ns + "/" + cached[4]); ok || isBound(claim) {
		t.Error("the watch was not held back: nothing was tested")
	}
}

// TestReplacedClaim replaces a bound claim that the cache still has, as the cleanup of a lost node does.
func TestReplacedClaim(t *testing.T) {
	f, _, held := reading(t)
	class := f.class("dc1", "dc1")
	f.claim("c", class, "1Gi", func(c *corev1.PersistentVolumeClaim) { c.Finalizers = []string{"example.com/keep"} })
	f.bind("c")
	claims := f.client.CoreV1().PersistentVolumeClaims(f.ns)
	f.must(claims.Delete(f.Context(), "c", metav1.DeleteOptions{}))
	f.eventually("the cache shows the deletion", func(context.Context) error {
		if c, ok := f.s.deps.Claims.Get(f.ns + "/c"); !ok || c.DeletionTimestamp == nil || !isBound(c) {
			return fmt.Errorf("it is %v", c)
		}
		return nil
	})
	held.shut()
	_, err := claims.Patch(f.Context(), "c", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	f.must(err)
	f.newClaim("c", &class, "2Gi")
	f.sized("the new claim", 2, "c")
}

// TestClassNewerThanTheCache creates a class, claims and a pod together: the claims count although the
// cache does not have the class yet, and each class is read once.
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
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: f.ns + "-late"}, Provisioner: f.cfg.Driver,
		Parameters: map[string]string{f.cfg.DeviceClassParameter: "dc1"}}
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

// TestForbiddenReadIsAnError expects HTTP 500 and not a response if a read is forbidden.
func TestForbiddenReadIsAnError(t *testing.T) {
	t.Parallel()
	f := setup(t, func(f *fixture) { f.api = f.cp.UserConfig(f, "unprivileged") })
	class := f.class("dc1", "dc1")
	f.claim("c", class, "1Gi")
	code, body := f.post("/pod/mutate", "application/json", reviewOf(t, f.ns, "pods", podOf("p", claimVolume("v", "c"))))
	if code != 500 || !strings.Contains(string(body), "forbidden") || !strings.Contains(string(body), f.ns+"/c") {
		t.Errorf("%d %s", code, body)
	}
	code, body = f.post("/pvc/mutate", "application/json", reviewOf(t, f.ns, "persistentvolumeclaims", &corev1.PersistentVolumeClaim{
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &f.ns}}))
	if code != 500 || !strings.Contains(string(body), "forbidden") || !strings.Contains(string(body), "StorageClass") {
		t.Errorf("%d %s", code, body)
	}
}

// TestLiveReadsAreBounded expects 503 while other requests make as many live reads as all of them may.
func TestLiveReadsAreBounded(t *testing.T) {
	t.Parallel()
	var running atomic.Int64
	release := make(chan struct{})
	f := setup(t, func(f *fixture) {
		f.api = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if strings.Contains(r.URL.Path, "/persistentvolumeclaims/slow-") {
				running.Add(1)
				<-release
			}
			pass.ServeHTTP(w, r)
		})
	})
	pod := podOf("p")
	for i, name := range names("slow", maxReads) {
		pod.Spec.Volumes = append(pod.Spec.Volumes, claimVolume(fmt.Sprint("v", i), name))
	}
	review, codes := reviewOf(t, f.ns, "pods", pod), make(chan int)
	const requests = maxLiveReads / maxReads
	for range requests {
		go func() {
			code, _ := f.post("/pod/mutate?timeout=30s", "application/json", review)
			codes <- code
		}()
	}
	f.eventually("all live reads are running", func(context.Context) error {
		if n := running.Load(); n != maxLiveReads {
			return fmt.Errorf("%d reads", n)
		}
		return nil
	})
	if code, body := f.post("/pod/mutate?timeout=1s", "application/json", review); code != http.StatusServiceUnavailable {
		t.Errorf("one more request: %d %s", code, body)
	}
	if n := running.Load(); n != maxLiveReads {
		t.Errorf("%d reads at the same time, want %d", n, maxLiveReads)
	}
	close(release)
	for range requests {
		if code := <-codes; code != http.StatusOK {
			t.Errorf("a request that was being served: %d", code)
		}
	}
	f.sized("afterwards", 0)
}
