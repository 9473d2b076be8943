// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
)

var claimsResource = corev1.SchemeGroupVersion.WithResource("persistentvolumeclaims")

// recorder records what the handlers of an informer are called with.
type recorder struct {
	mu     sync.Mutex
	events []string
	last   string // resourceVersion, or the name of a deleted object
}

func (r *recorder) add(event string, obj any, last string) {
	m := obj.(metav1.Object)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, fmt.Sprintf("%T %s %s %v %v deleting=%t", obj, event, m.GetName(), m.GetLabels(), m.GetFinalizers(),
		m.GetDeletionTimestamp() != nil))
	if r.last = m.GetResourceVersion(); last != "" {
		r.last = last
	}
}

func (r *recorder) OnAdd(obj any, initial bool) {
	r.add(fmt.Sprintf("add initial=%t", initial), obj, "")
}
func (r *recorder) OnUpdate(_, obj any) { r.add("update", obj, "") }
func (r *recorder) OnDelete(obj any) {
	if unknown, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = unknown.Obj
	}
	r.add("delete", obj, obj.(metav1.Object).GetName())
}

func (r *recorder) saw(last string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last != last {
		return fmt.Errorf("saw %q, want %q", r.last, last)
	}
	return nil
}

func must[T any](t *testing.T, obj T, err error) T {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return obj
}

func newClaim(name string) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceStorage: resource.MustParse("1Gi"),
			}},
		},
	}
}

// startInformer starts an informer for claims of one encoding, which stops with ctx.
func startInformer(ctx context.Context, t *testing.T, cfg *rest.Config, encoding string, h cache.ResourceEventHandler) (wait func()) {
	t.Helper()
	cfg = rest.CopyConfig(cfg)
	var informer cache.SharedIndexInformer
	if encoding == "metadata" {
		client, err := metadata.NewForConfig(cfg)
		factory := metadatainformer.NewFilteredSharedInformerFactory(must(t, client, err), 0, "informers", nil)
		informer = factory.ForResource(claimsResource).Informer()
	} else {
		if cfg.ContentType = runtime.ContentTypeJSON; encoding == "protobuf" {
			cfg.ContentType = runtime.ContentTypeProtobuf
		}
		client, err := kubernetes.NewForConfig(cfg)
		factory := informers.NewSharedInformerFactoryWithOptions(must(t, client, err), 0, informers.WithNamespace("informers"))
		informer = factory.Core().V1().PersistentVolumeClaims().Informer()
	}
	if _, err := informer.AddEventHandler(h); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { informer.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		t.Fatal("the informer has not synced")
	}
	return wg.Wait
}

// story writes claims and waits until the handlers have seen each write.
func story(t *testing.T, cfg *rest.Config, encoding string) []string {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	client, err := kubernetes.NewForConfig(cfg)
	claims := must(t, client, err).CoreV1().PersistentVolumeClaims("informers")
	first, err := claims.Create(ctx, newClaim("first-"+encoding), metav1.CreateOptions{})
	must(t, first, err)
	r := &recorder{}
	wait := startInformer(ctx, t, cfg, encoding, r)
	saw := func(last string) {
		t.Helper()
		kubetest.Eventually(t, encoding+" informer sees the write", func(context.Context) error { return r.saw(last) })
	}
	saw(first.ResourceVersion)
	second, err := claims.Create(ctx, newClaim("second-"+encoding), metav1.CreateOptions{})
	saw(must(t, second, err).ResourceVersion)
	patch := func(data string, subresources ...string) {
		t.Helper()
		pvc, err := claims.Patch(ctx, second.Name, types.MergePatchType, []byte(data), metav1.PatchOptions{}, subresources...)
		if must(t, pvc, err); len(pvc.Finalizers) == 0 {
			saw(pvc.Name)
			return
		}
		saw(pvc.ResourceVersion)
	}
	patch(`{"metadata":{"labels":{"a":"b"}}}`)
	patch(`{"status":{"phase":"Bound"}}`, "status")
	patch(`{"metadata":{"labels":{"a":"b"}}}`) // no change
	if err := claims.Delete(ctx, second.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	deleting, err := claims.Get(ctx, second.Name, metav1.GetOptions{})
	saw(must(t, deleting, err).ResourceVersion)
	patch(`{"metadata":{"finalizers":null}}`)
	cleared, err := claims.Patch(ctx, first.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	must(t, cleared, err)
	if err := claims.Delete(ctx, first.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	saw(first.Name)
	cancel()
	wait()
	return r.events
}

// TestInformersSeeTheSame runs informers of all encodings on both servers.
func TestInformersSeeTheSame(t *testing.T) {
	controlPlane := kubetest.Get(t, kubetest.Real())
	memory := apiserver.New(apiserver.Hooks{})
	for _, encoding := range []string{"json", "protobuf", "metadata"} {
		var seen [][]string
		for _, cfg := range []*rest.Config{controlPlane.Config(), memory.Config("informers")} {
			client, err := kubernetes.NewForConfig(cfg)
			_, err = must(t, client, err).CoreV1().Namespaces().Create(t.Context(),
				&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "informers"}}, metav1.CreateOptions{})
			if err != nil && !apierrors.IsAlreadyExists(err) {
				t.Fatal(err)
			}
			seen = append(seen, story(t, cfg, encoding))
		}
		if diff := cmp.Diff(seen[0], seen[1]); diff != "" {
			t.Errorf("%s: events (-real +memory):\n%s", encoding, diff)
		}
		if len(seen[0]) < 8 {
			t.Errorf("%s: events %q", encoding, seen[0])
		}
	}
}

// TestBubble runs client-go in virtual time: a watch breaks, history is compacted, and the informer lists again.
func TestBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := apiserver.New(apiserver.Hooks{})
		client, err := kubernetes.NewForConfig(s.Config("user"))
		must(t, client, err)
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "informers"}}
		_, err = client.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{})
		must(t, client, err)
		claims := client.CoreV1().PersistentVolumeClaims("informers")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		recorders := map[string]*recorder{"json": {}, "protobuf": {}, "metadata": {}}
		for encoding, r := range recorders {
			defer startInformer(ctx, t, s.Config(encoding), encoding, r)()
		}
		defer cancel()
		pvc, err := claims.Create(ctx, newClaim("a"), metav1.CreateOptions{})
		must(t, pvc, err)
		time.Sleep(15 * time.Minute) // the watches end and begin again, from a bookmark
		s.CloseWatches(func(r apiserver.Request) bool { return r.Client != "user" }, errors.New("connection reset"))
		_, err = claims.Patch(ctx, "a", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		must(t, pvc, err)
		if err := claims.Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		s.Compact(s.Version())
		time.Sleep(time.Minute)
		synctest.Wait()
		for encoding, r := range recorders {
			if err := r.saw("a"); err != nil {
				t.Errorf("%s: %v", encoding, err)
			}
		}
	})
}

// TestHooks injects the faults that a test needs.
func TestHooks(t *testing.T) {
	fault := func(apiserver.Request) error { return nil }
	after, cached, delivered := fault, uint64(0), error(nil)
	s := apiserver.New(apiserver.Hooks{
		Before:  func(_ context.Context, r apiserver.Request) error { return fault(r) },
		After:   func(_ context.Context, r apiserver.Request, _ apiserver.Result) error { return after(r) },
		Deliver: func(context.Context, apiserver.Request, watch.EventType, metav1.Object) error { return delivered },
		Cached:  func(apiserver.Request) uint64 { return cached },
	})
	client, err := kubernetes.NewForConfig(s.Config("user"))
	volumes := must(t, client, err).CoreV1().ConfigMaps("default")
	create := func(name string) error {
		_, err := volumes.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		return err
	}
	conflict := apierrors.NewConflict(corev1.Resource("configmaps"), "refused", errors.New("injected"))
	fault = func(apiserver.Request) error { return conflict }
	if err := create("refused"); !apierrors.IsConflict(err) {
		t.Errorf("error %v, want a conflict", err)
	}
	fault = func(apiserver.Request) error { return nil }
	after = func(r apiserver.Request) error {
		if r.Verb == "create" && r.Client == "user" && r.Resource.Resource == "configmaps" {
			return errors.New("connection reset")
		}
		return nil
	}
	if err := create("stored"); err == nil || apierrors.ReasonForError(err) != metav1.StatusReasonUnknown {
		t.Errorf("error %v, want one of the network", err)
	}
	names := func(o metav1.ListOptions) (names []string) {
		list, err := volumes.List(t.Context(), o)
		for _, m := range must(t, list, err).Items {
			names = append(names, m.Name)
		}
		return names
	}
	if got := names(metav1.ListOptions{}); !slices.Equal(got, []string{"stored"}) {
		t.Errorf("objects %q, want the one whose response was dropped", got)
	}
	cached = s.Version() - 1
	if got := names(metav1.ListOptions{ResourceVersion: "0"}); len(got) != 0 {
		t.Errorf("objects %q in a cache from before", got)
	}
	delivered = apierrors.NewResourceExpired("injected")
	w, err := volumes.Watch(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
	event, ok := <-must(t, w, err).ResultChan()
	if !ok || event.Type != watch.Error || !apierrors.IsResourceExpired(apierrors.FromObject(event.Object)) {
		t.Errorf("event %v, want the injected error", event)
	}
	w.Stop()
}

// TestExpiredPage asks for the second page after the first has expired.
func TestExpiredPage(t *testing.T) {
	s := apiserver.New(apiserver.Hooks{})
	client, err := kubernetes.NewForConfig(s.Config("user"))
	namespaces := must(t, client, err).CoreV1().Namespaces()
	page, err := namespaces.List(t.Context(), metav1.ListOptions{Limit: 1})
	must(t, page, err)
	_, err = namespaces.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "late"}}, metav1.CreateOptions{})
	must(t, page, err)
	s.Compact(s.Version())
	_, err = namespaces.List(t.Context(), metav1.ListOptions{Limit: 1, Continue: page.Continue})
	if !apierrors.IsResourceExpired(err) {
		t.Fatalf("error %v, want Expired", err)
	}
	rest, err := namespaces.List(t.Context(), metav1.ListOptions{Continue: err.(apierrors.APIStatus).Status().Continue})
	if must(t, rest, err); len(rest.Items) != 4 || rest.Items[3].Name != "late" {
		t.Errorf("%d objects after the first page of 5, want 4 of the current state", len(rest.Items))
	}
}
