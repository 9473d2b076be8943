// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// withDefault is held by tests that create a default class or need none: the cluster is shared.
var withDefault sync.Mutex

func isDefaultClass(class *storagev1.StorageClass) {
	class.Annotations = map[string]string{kube.AnnotationDefaultClass: "true"}
}

func TestNodecontrollerScenarioWebhookPods(t *testing.T) {
	t.Run("065_pods_without_our_volumes", func(t *testing.T) {
		f := scenario(t, nil)
		f.claim("foreign", f.class("foreign", "", foreign), "1Gi")
		f.bind("foreign")
		f.cached("foreign", corev1.ClaimBound)
		reads := f.metric("storage_controller_webhook_live_reads_total")
		f.unpatched(f.create())
		f.unpatched(f.createPod(podOf("pod-", emptyDir("e"), claimVolume("c", "foreign"),
			ephemeralVolume("t", ptr.To(f.ns+"-foreign"), "1Gi"))))
		if now := f.metric("storage_controller_webhook_live_reads_total"); now != reads {
			t.Errorf("%v reads for pods that are none of the driver's", now-reads)
		}
		if n := f.metric("storage_controller_webhook_requests_total", "result", "patched"); n != 0 {
			t.Errorf("%v patches", n)
		}
		web := f.web()
		for path, want := range map[string]int{"/pod/mutate": 405, "/pvc/mutate": 405, "/": 404, "/pod": 404, "/pod/mutate/": 404,
			"/pod//mutate": 404} {
			response, err := web.Get("https://" + f.s.Address() + path)
			f.must(err)
			response.Body.Close()
			if response.StatusCode != want {
				t.Errorf("GET %s: %d, want %d", path, response.StatusCode, want)
			}
		}
		if code, body := f.post("/elsewhere", "application/json", reviewOf(t, f.ns, "pods", podOf("p"))); code != 404 {
			t.Errorf("%d %s", code, body)
		}
	})
	t.Run("066_pending_claim", func(t *testing.T) {
		f := scenario(t, nil)
		c := f.claim("c", f.class("dc1", "dc1"), "100Gi")
		pod := podOf("pod-", claimVolume("v", c))
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("10Mi")}
		pod = f.createPod(pod)
		f.patched(pod, map[string]string{"dc1": "107374182400"})
		if memory := pod.Spec.Containers[0].Resources.Requests[corev1.ResourceMemory]; memory.String() != "10Mi" {
			t.Errorf("the request for memory is %v", memory)
		}
	})
	t.Run("067_sums", func(t *testing.T) {
		f := scenario(t, nil)
		one, two, three := f.class("dc1", "dc1"), f.class("dc2", "dc2"), f.class("dc3", "dc3")
		f.claim("one", one, "100Gi")
		f.claim("two", two, "3Gi")
		f.claim("three", three, "4Gi")
		f.claim("more", one, "2147483647")
		f.claim("foreign", f.class("foreign", "dc1", foreign), "7Gi")
		f.patched(f.create("one", "two", "three"), map[string]string{"dc1": "107374182400", "dc2": "3221225472", "dc3": "4294967296"})
		f.patched(f.create("one", "more", "foreign"), map[string]string{"dc1": "109521666047"})
	})
	t.Run("068_sizes", func(t *testing.T) {
		f := scenario(t, nil)
		class := f.class("dc1", "dc1")
		f.claim("half", class, "500Mi")
		f.patched(f.create("half"), map[string]string{"dc1": "524288000"})
		// The API server accepts neither for a claim, and checks templates after the webhook.
		for _, storage := range []string{`{}`, `{"storage":"0"}`, `{"storage":0}`, `null`} {
			raw := fmt.Sprintf(
				`{"metadata":{},"spec":{"containers":[{}],"volumes":[{"ephemeral":{"volumeClaimTemplate":{"spec":{"storageClassName":%q,"resources":{"requests":%s}}}}}]}}`, class, storage)
			answer := f.ask("/pod/mutate", "pods", json.RawMessage(raw))
			if !strings.Contains(string(answer.Patch), `"value":"1073741824"`) {
				t.Errorf("%s: %s", storage, answer.Patch)
			}
		}
	})
	t.Run("069_device_class", func(t *testing.T) {
		f := scenario(t, nil)
		f.claim("without", f.class("without", "", func(c *storagev1.StorageClass) { c.Parameters = nil }), "1Gi")
		f.claim("empty", f.class("empty", ""), "1Gi")
		f.claim("bad", f.class("bad", "bad/name"), "1Gi")
		f.patched(f.create("without"), map[string]string{"00default": "1073741824"})
		f.patched(f.create("empty"), map[string]string{"00default": "1073741824"})
		heard := &warnings{}
		cfg := f.cp.Config()
		cfg.WarningHandler = heard
		client, err := kubernetes.NewForConfig(cfg)
		f.must(err)
		pod, err := client.CoreV1().Pods(f.ns).Create(t.Context(), podOf("pod-", claimVolume("a", "bad"), claimVolume("b", "empty")),
			metav1.CreateOptions{})
		f.must(err)
		f.unpatched(pod)
		if len(*heard) != 1 || !strings.Contains((*heard)[0], `"bad/name"`) {
			t.Errorf("warnings %q", *heard)
		}
	})
	t.Run("070_bound_claims", func(t *testing.T) {
		gate := &gate{}
		f := scenario(t, func(f *fixture) { f.watch = gate.before(t, f.cp.Config(), "/persistentvolumeclaims") })
		class := f.class("dc1", "dc1")
		f.claim("pending", class, "1Gi")
		f.claim("bound", class, "1Gi")
		f.bind("bound")
		f.cached("bound", corev1.ClaimBound)
		reads := f.metric("storage_controller_webhook_live_reads_total")
		f.unpatched(f.create("pending", "bound"))
		if now := f.metric("storage_controller_webhook_live_reads_total"); now != reads {
			t.Errorf("%v reads although the cache has a bound claim", now-reads)
		}
		f.claim("promised", class, "1Gi", func(pvc *corev1.PersistentVolumeClaim) { pvc.Spec.VolumeName = "some-volume" })
		f.unpatched(f.create("promised"))
		f.patched(f.create("pending"), map[string]string{"dc1": "1073741824"})
		gate.shut()
		f.bind("pending")
		f.unpatched(f.create("pending"))
		if pvc, _ := f.s.deps.Claims.Get(f.ns + "/pending"); pvc.Status.Phase != corev1.ClaimPending {
			t.Error("the watch was not held back: nothing was tested")
		}
	})
	t.Run("071_missing", func(t *testing.T) {
		f := scenario(t, nil)
		class := f.class("dc1", "dc1")
		f.claim("classless", "", "1Gi")
		f.claim("lost", f.ns+"-nothing", "1Gi")
		f.unpatched(f.create("missing"))
		f.unpatched(f.create("lost"))
		f.unpatched(f.create("classless"))
		f.unpatched(f.createPod(podOf("pod-", ephemeralVolume("v", ptr.To(""), "1Gi"),
			ephemeralVolume("w", ptr.To(f.ns+"-nothing"), "1Gi"))))
		withDefault.Lock()
		defer withDefault.Unlock()
		f.newClaim("none", nil, "1Gi")
		f.cached("none", corev1.ClaimPending)
		f.unpatched(f.create("none"))
		// Missing objects do not affect the others.
		f.claim("good", class, "1Gi")
		f.patched(f.create("missing", "lost", "classless", "none", "good"), map[string]string{"dc1": "1073741824"})
	})
	t.Run("072_ephemeral_volumes", func(t *testing.T) {
		f := scenario(t, nil)
		class := f.class("dc1", "dc1")
		f.patched(f.createPod(podOf("pod-", ephemeralVolume("v", &class, "100Gi"))), map[string]string{"dc1": "107374182400"})
		withDefault.Lock()
		defer withDefault.Unlock()
		older := f.class("a-standard", "older", isDefaultClass)
		f.patched(f.createPod(podOf("pod-", ephemeralVolume("v", nil, "100Gi"))), map[string]string{"older": "107374182400"})
		// Of several the newest is the default, whatever their names. Their age is known by the second.
		f.eventually("the second is over", func(ctx context.Context) error {
			class, err := f.client.StorageV1().StorageClasses().Get(ctx, older, metav1.GetOptions{})
			if err == nil && time.Since(class.CreationTimestamp.Time) < time.Second {
				err = errors.New("it is not")
			}
			return err
		})
		standard := f.class("standard", "dc1", isDefaultClass)
		f.patched(f.createPod(podOf("pod-", ephemeralVolume("v", nil, "100Gi"))), map[string]string{"dc1": "107374182400"})
		for _, name := range []string{older, standard} {
			f.must(f.client.StorageV1().StorageClasses().Delete(t.Context(), name, metav1.DeleteOptions{}))
		}
	})
	t.Run("073_claim_twice", func(t *testing.T) {
		f := scenario(t, nil)
		c := f.claim("c", f.class("dc1", "dc1"), "1Gi")
		f.patched(f.create(c, c), map[string]string{"dc1": "1073741824"})
		f.patched(f.createPod(podOf("pod-", claimVolume("a", c), ephemeralVolume("b", ptr.To(f.ns+"-dc1"), "1Gi"),
			ephemeralVolume("c", ptr.To(f.ns+"-dc1"), "1Gi"))),
			map[string]string{"dc1": "3221225472"})
	})
	t.Run("074_claim_newer_than_the_cache", func(t *testing.T) {
		gate := &gate{}
		f := scenario(t, func(f *fixture) { f.watch = gate.before(t, f.cp.Config(), "/persistentvolumeclaims") })
		class := f.class("dc1", "dc1")
		gate.shut()
		f.newClaim("new", &class, "100Gi")
		reads := f.metric("storage_controller_webhook_live_reads_total")
		f.patched(f.create("new"), map[string]string{"dc1": "107374182400"})
		if n := f.metric("storage_controller_webhook_live_reads_total") - reads; n != 1 {
			t.Errorf("%v live reads, want 1", n)
		}
		if _, ok := f.s.deps.Claims.Get(f.ns + "/new"); ok {
			t.Error("the watch was not held back: nothing was tested")
		}
	})
	t.Run("075_odd_pods", func(t *testing.T) {
		f := scenario(t, nil)
		c := f.claim("c", f.class("dc1", "dc1"), "1Gi")
		pod := podOf("pod-", claimVolume("v", c))
		pod.Annotations = map[string]string{"a.b/c": "d", "e": "f"}
		pod = f.createPod(pod)
		if pod.Annotations["a.b/c"] != "d" || pod.Annotations["e"] != "f" || pod.Annotations["capacity.topolvm.io/dc1"] != "1073741824" {
			t.Errorf("annotations %v", pod.Annotations)
		}
		for _, raw := range []string{
			`{"metadata":{"name":"p"},"spec":{"containers":[{"name":"a"}],"volumes":[{"name":"v","persistentVolumeClaim":{"claimName":"c"}}]}}`,
			`{"metadata":null,"spec":{"containers":[{"resources":null}],"volumes":[{"name":"v","persistentVolumeClaim":{"claimName":"c"}}]}}`,
			`{"kind":"Pod","metadata":{"annotations":{"a/b~c":"1","~0":"2","~1/":"3"},"newField":{"x":[1,2,{"y":null}]}},` +
				`"spec":{"newField":{"a":1.0000000000000000001},"containers":[{"name":"a","newField":true,"resources":{"limits":{"cpu":"1"},"requests":{},"claims":[{"name":"x"}],"newField":[]}},{"name":"b"}],` +
				`"volumes":[{"name":"v","newField":1,"persistentVolumeClaim":{"claimName":"c","newField":2}}]},"status":{"newField":"x"}}`,
		} {
			f.onlyAdds(raw, f.ask("/pod/mutate", "pods", json.RawMessage(raw)).Patch)
		}
	})
	t.Run("076_excluded_namespaces", scenarioExcluded)
	t.Run("077_failing_reads", func(t *testing.T) {
		t.Parallel()
		for _, policy := range []admissionregistrationv1.FailurePolicyType{admissionregistrationv1.Ignore, admissionregistrationv1.Fail} {
			t.Run(string(policy), func(t *testing.T) {
				f := scenario(t, func(f *fixture) {
					f.api = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
						if strings.Contains(r.URL.Path, "/persistentvolumeclaims/c") {
							http.Error(w, "no", http.StatusInternalServerError)
							return
						}
						pass.ServeHTTP(w, r)
					})
				})
				c := f.claim("c", f.class("dc1", "dc1"), "1Gi")
				_, err := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(t.Context(), f.ns, metav1.GetOptions{})
				f.must(err)
				f.setPolicy(policy)
				// The API server goes by the new policy a little later.
				kubetest.Eventually(t, "the failure policy decides", func(ctx context.Context) error {
					pod, err := f.client.CoreV1().Pods(f.ns).Create(ctx, podOf("pod-", claimVolume("v", c)), metav1.CreateOptions{})
					switch {
					case policy == admissionregistrationv1.Fail && apierrors.IsInternalError(err) &&
						strings.Contains(err.Error(), "reading PersistentVolumeClaim"):
						return nil
					case policy == admissionregistrationv1.Ignore && err == nil:
						f.unpatched(pod)
						return nil
					}
					return fmt.Errorf("it does not: %v", err)
				})
				if n := f.metric("storage_controller_webhook_requests_total", "code", "500", "result", "error"); n == 0 {
					t.Error("no error was counted")
				}
			})
		}
	})
	t.Run("078_malformed", scenarioMalformed)
	t.Run("079_again", func(t *testing.T) {
		f := scenario(t, nil)
		pod := podOf("pod-", claimVolume("v", f.claim("c", f.class("dc1", "dc1"), "1Gi")))
		pod.Annotations = map[string]string{"capacity.topolvm.io/dc1": "7", "other": "x"}
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{capacityResource: resource.MustParse("5")}
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{capacityResource: resource.MustParse("5")}
		pod = f.createPod(pod)
		if pod.Annotations["capacity.topolvm.io/dc1"] != "1073741824" {
			t.Errorf("annotations %v", pod.Annotations)
		}
		reads := f.metric("storage_controller_webhook_live_reads_total")
		if answer := f.ask("/pod/mutate", "pods", pod); answer.Patch != nil || answer.PatchType != nil {
			t.Errorf("%s %v", answer.Patch, answer.PatchType)
		}
		if now := f.metric("storage_controller_webhook_live_reads_total"); now != reads {
			t.Errorf("%v reads for a pod that is as it should be", now-reads)
		}
		// Annotations of a copied manifest stay.
		pod.Annotations["capacity.topolvm.io/copied"] = "1"
		if answer := f.ask("/pod/mutate", "pods", pod); answer.Patch != nil {
			t.Errorf("%s", answer.Patch)
		}
	})
}

func (f *fixture) setPolicy(policy admissionregistrationv1.FailurePolicyType) {
	f.Helper()
	configs := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	config, err := configs.Get(f.Context(), f.ns, metav1.GetOptions{})
	f.must(err)
	for i := range config.Webhooks {
		config.Webhooks[i].FailurePolicy = &policy
	}
	_, err = configs.Update(f.Context(), config, metav1.UpdateOptions{})
	f.must(err)
}

// onlyAdds applies patch to raw, and fails the test unless it adds just the mark and an
// annotation of 1 GiB of dc1.
func (f *fixture) onlyAdds(raw string, patch []byte) {
	f.Helper()
	var want map[string]any
	f.must(json.Unmarshal([]byte(raw), &want))
	at := func(parent map[string]any, key string) map[string]any {
		if m, ok := parent[key].(map[string]any); ok {
			return m
		}
		m := map[string]any{}
		parent[key] = m
		return m
	}
	at(at(want, "metadata"), "annotations")["capacity.topolvm.io/dc1"] = "1073741824"
	first := want["spec"].(map[string]any)["containers"].([]any)[0].(map[string]any)
	at(at(first, "resources"), "limits")[string(capacityResource)] = "1"
	at(at(first, "resources"), "requests")[string(capacityResource)] = "1"
	var got map[string]any
	f.must(json.Unmarshal(apply(f, []byte(raw), patch), &got))
	if diff := cmp.Diff(want, got); diff != "" {
		f.Errorf("%s\n%s", patch, diff)
	}
}

// warnings collects the warnings that a client received.
type warnings []string

func (w *warnings) HandleWarningHeader(_ int, _ string, text string) { *w = append(*w, text) }

// gate delays the watch events of a resource once it is shut.
type gate struct {
	mu     sync.Mutex
	closed chan struct{}
}

// before returns cfg behind the gate, for requests with part in their path.
func (g *gate) before(t *testing.T, cfg *rest.Config, part string) *rest.Config {
	proxied := kubetest.Proxy(t, cfg, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if strings.Contains(r.URL.Path, part) {
			w = gated{w, g, r.Context()}
		}
		pass.ServeHTTP(w, r)
	})
	return proxied
}

func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = make(chan struct{})
}

type gated struct {
	http.ResponseWriter
	gate *gate
	ctx  context.Context
}

func (w gated) Write(p []byte) (int, error) {
	w.gate.mu.Lock()
	closed := w.gate.closed
	w.gate.mu.Unlock()
	if closed != nil {
		select {
		case <-closed:
		case <-w.ctx.Done():
			return 0, w.ctx.Err()
		}
	}
	return w.ResponseWriter.Write(p)
}

func (w gated) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// scenarioMalformed sends requests that no API server sends.
func scenarioMalformed(t *testing.T) {
	t.Parallel()
	f := setup(t, func(f *fixture) {
		f.hook = func(s *Server) {
			decide := s.mutatePod
			s.mutations["/pod/mutate"] = mutation{"pods", func(ctx context.Context, r *request) (verdict, error) {
				if r.UID == "panic" {
					panic("injected")
				}
				return decide(ctx, r)
			}}
		}
	})
	good := string(reviewOf(t, f.ns, "pods", podOf("p", claimVolume("v", "c"))))
	without := func(old, new string) string {
		t.Helper()
		if !strings.Contains(good, old) {
			t.Fatalf("%s is not in %s", old, good)
		}
		return strings.Replace(good, old, new, 1)
	}
	for name, c := range map[string]struct {
		media, body string
		code        int
	}{
		"good":                  {"application/json", good, 200},
		"media with parameters": {"application/json; charset=utf-8", good, 200},
		"version v1beta1":       {"application/json", without("admission.k8s.io/v1", "admission.k8s.io/v1beta1"), 200},
		"another resource":      {"application/json", without(`"resource":"pods"`, `"resource":"secrets"`), 200},
		"another operation":     {"application/json", without("CREATE", "DELETE"), 200},
		"no content type":       {"", good, 415},
		"text":                  {"text/plain", good, 415},
		"broken content type":   {"application/json;;;==", good, 415},
		"9 MiB":                 {"application/json", strings.Repeat(" ", 9<<20), 413},
		"16 MiB":                {"application/json", good + strings.Repeat(" ", 16<<20), 413},
		"garbage":               {"application/json", "\x00\xff{", 400},
		"empty":                 {"application/json", "", 400},
		"null":                  {"application/json", "null", 400},
		"list":                  {"application/json", "[]", 400},
		"two documents":         {"application/json", good + good, 400},
		"no uid":                {"application/json", without(`"uid":"u1"`, `"uid":""`), 400},
		"number as uid":         {"application/json", without(`"uid":"u1"`, `"uid":1`), 400},
		"two uids":              {"application/json", without(`"uid":"u1"`, `"uid":"u1","uid":"u2"`), 400},
		"no request":            {"application/json", `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`, 400},
		"another version":       {"application/json", without("admission.k8s.io/v1", "admission.k8s.io/v2"), 400},
		"another kind":          {"application/json", without("AdmissionReview", "TokenReview"), 400},
		"no namespace":          {"application/json", without(f.ns, ""), 400},
		"deep":                  {"application/json", without(`"containers":[`, `"containers":[`+strings.Repeat("[", 1<<20)), 400},
		"deep and closed": {"application/json",
			without(`"uid"`, `"x":`+strings.Repeat(`{"a":`, 1<<18)+"1"+strings.Repeat("}", 1<<18)+`,"uid"`), 400},
		"no pod":          {"application/json", string(reviewOf(t, f.ns, "pods", []int{1})), 400},
		"bad annotations": {"application/json", string(reviewOf(t, f.ns, "pods", json.RawMessage(`{"metadata":{"annotations":[]}}`))), 400},
		"panic":           {"application/json", without("u1", "panic"), 500},
		"good after that": {"application/json", good, 200},
	} {
		code, body := f.post("/pod/mutate", c.media, []byte(c.body))
		if code != c.code {
			t.Errorf("%s: %d %.300s, want %d", name, code, body, c.code)
		}
		if version := `"apiVersion":"admission.k8s.io/v1beta1"`; strings.Contains(c.body, version) &&
			!strings.Contains(string(body), version) {
			t.Errorf("%s: another version in the answer %s", name, body)
		}
	}
	if code, body := f.post("/pod/mutate", "application/json", []byte(good)); code != 200 {
		t.Errorf("it does not serve any more: %d %s", code, body)
	}
	if n := f.metric("storage_controller_webhook_requests_in_flight"); n != 0 {
		t.Errorf("%v requests in flight", n)
	}
	// A read that takes too long is an error.
	if code, _ := f.post("/pod/mutate?timeout=500ms", "application/json", []byte(good)); code != 500 {
		t.Errorf("a read that had no time: %d", code)
	}
	for text, want := range map[string]time.Duration{"": maxTime, "x": maxTime, "5s": 4500 * time.Millisecond, "1m": maxTime} {
		if got := deadline(text); got != want {
			t.Errorf("deadline of %q: %v", text, got)
		}
	}
}
