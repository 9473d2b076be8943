package webhook

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// liveReads counts the live reads of claims, and may have them answered by somebody else.
type liveReads struct {
	lists, gets atomic.Int64
	list        http.Handler // nil: the API server
}

// reading is a server and its live reads. What its cache is told is held back when the
// gate is shut.
func reading(t *testing.T, list http.Handler) (*fixture, *liveReads, *gate) {
	t.Parallel()
	reads, held := &liveReads{list: list}, &gate{}
	f := setup(t, func(f *fixture) {
		f.watch = held.before(t, f.cp.Config(), "/persistentvolumeclaims")
		f.api = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			switch {
			case strings.HasSuffix(r.URL.Path, "/persistentvolumeclaims"):
				reads.lists.Add(1)
				if reads.list != nil {
					pass = reads.list
				}
			case strings.Contains(r.URL.Path, "/persistentvolumeclaims/"):
				reads.gets.Add(1)
			}
			pass.ServeHTTP(w, r)
		})
	})
	return f, reads, held
}

// were fails the test unless there were so many live reads since the last call.
func (r *liveReads) were(t *testing.T, what string, lists, gets int64) {
	t.Helper()
	if l, g := r.lists.Swap(0), r.gets.Swap(0); l != lists || g != gets {
		t.Errorf("%s: %d lists and %d single reads, want %d and %d", what, l, g, lists, gets)
	}
}

// names is n names that begin with prefix.
func names(prefix string, n int) []string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf("%s-%d", prefix, i))
	}
	return all
}

// sized fails the test unless a pod with claims is told to need so many GiB of dc1; 0 is
// for a pod that stays as it is.
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

func TestManyClaimsAreListed(t *testing.T) {
	f, reads, held := reading(t, nil)
	class := f.class("dc1", "dc1")
	cached := names("cached", maxReads+1)
	for _, name := range cached {
		f.claim(name, class, "1Gi")
	}
	f.sized("claims that the cache has", 11, cached...)
	reads.were(t, "claims that the cache has", 1, 0)
	f.sized("few claims", 10, cached[:maxReads]...)
	reads.were(t, "few claims", 0, 10)
	f.sized("missing claims", 0, names("missing", 11)...)
	reads.were(t, "missing claims", 1, 0)
	f.sized("thousands of missing claims", 0, names("missing", 5000)...)
	reads.were(t, "thousands of missing claims", 1, 0)

	held.shut()
	created := names("created", 5)
	for _, name := range created {
		f.newClaim(name, &class, "2Gi")
	}
	everything := append(append(names("missing", 6), cached...), created...)
	f.sized("claims of all sorts, some newer than the cache", 21, everything...)
	reads.were(t, "claims of all sorts", 1, 0)
	f.bind(cached[4])
	f.sized("a claim that is bound but not in the cache", 0, everything...)
	reads.were(t, "a claim that is bound but not in the cache", 1, 0)
	_, ok := f.s.deps.Claims.Get(f.ns + "/" + created[0])
	if pvc, _ := f.s.deps.Claims.Get(f.ns + "/" + cached[4]); ok || isBound(pvc) {
		t.Error("the watch was not held back: nothing was tested")
	}
}

// A namespace of many claims is listed for a pod that names many of them only.
func TestListOfAFullNamespace(t *testing.T) {
	f, reads, _ := reading(t, nil)
	class := f.class("dc1", "dc1")
	many := names("c", 10*(maxReads+1)+5)
	for _, name := range many {
		f.newClaim(name, &class, "1Gi")
	}
	f.cached(many[len(many)-1], corev1.ClaimPending)
	f.sized("some of many", 11, many[:11]...)
	reads.were(t, "some of many", 0, 11)
	f.sized("more than a page", len(many), many...)
	reads.were(t, "more than a page", 2, 0)
}

func TestListThatFails(t *testing.T) {
	f, reads, _ := reading(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "no lists today", http.StatusInternalServerError)
	}))
	class := f.class("dc1", "dc1")
	some := names("c", 5)
	for _, name := range some {
		f.claim(name, class, "1Gi")
	}
	f.sized("claims that are read one by one", 5, some...)
	reads.were(t, "claims that are read one by one", 0, 5)
	pod := podOf("p")
	for i, name := range names("missing", maxReads+1) {
		pod.Spec.Volumes = append(pod.Spec.Volumes, claimVolume(fmt.Sprint("v", i), name))
	}
	code, body := f.post("/pod/mutate", "application/json", reviewOf(t, f.ns, "pods", pod))
	if text := string(body); code != 500 || !strings.Contains(text, "no lists today") || !strings.Contains(text, fmt.Sprintf("%q", f.ns)) {
		t.Errorf("%d %s", code, text)
	}
	reads.were(t, "too many claims to be read", 1, 0)
}
