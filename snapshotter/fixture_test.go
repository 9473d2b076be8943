// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/looptest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

// CSI methods.
const (
	createSnapshot = "CreateSnapshot"
	removeSnapshot = "DeleteSnapshot"
	listSnapshots  = "ListSnapshots"
	getSnapshot    = "GetSnapshot"
	createGroup    = "CreateVolumeGroupSnapshot"
	removeGroup    = "DeleteVolumeGroupSnapshot"
	getGroup       = "GetVolumeGroupSnapshot"
)

// uid is the UID of the VolumeSnapshot s1 and of the VolumeGroupSnapshot s1.
const uid = "0123abcd-4567-89ef-0123-456789abcdef"

// served runs a controller as a process with leader election does.
type served struct{ *Controller }

func (s served) Run(ctx context.Context) error {
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() { _ = s.Serve(serving) })
	for {
		if err := s.WaitAvailable(ctx); err != nil {
			return err
		}
		if err := s.Controller.Run(ctx); err != nil {
			return err
		}
	}
}

// fixture runs a snapshotter. Scenarios run in parallel: the names of their objects begin with the
// namespace.
type fixture struct {
	*looptest.Fixture
	cfg Config
	c   *Controller // of the last start
	typedClients
	events   *events
	recorder record.EventRecorder // events, or a transcript
	requests *requests
	volume   string // handle of a volume of the driver

	mu       sync.Mutex
	watching []context.CancelFunc // see refuseWatches
}

// newFixture returns a fixture with the VolumeSnapshotClass c1, whose snapshotter does not run yet.
func newFixture(t *testing.T, plugin csitest.Config, change func(*Config)) *fixture {
	t.Helper()
	if plugin.Controller == nil {
		plugin.Controller = capabilities()
	}
	f := &fixture{Fixture: looptest.New(t, plugin), cfg: DefaultConfig(), events: &events{}}
	f.recorder = f.events
	kubetest.InstallCRDs(t, f.ControlPlane)
	f.cfg.RetryIntervalStart, f.cfg.RetryIntervalMax = 50*time.Millisecond, 400*time.Millisecond
	f.cfg.RecheckInterval = 200 * time.Millisecond
	if change != nil {
		change(&f.cfg)
	}
	f.useClients()
	f.requests = &requests{}
	f.Requests = f.ControlPlane.Config()
	f.Requests.Wrap(func(next http.RoundTripper) http.RoundTripper { return recording{f.requests, next} })
	var err error
	f.API, err = kubernetes.NewForConfig(f.Requests)
	f.Must(err)
	f.volume = f.Plugin.AddVolume("v", 1<<30)
	return f
}

func (f *fixture) useClients() {
	f.typedClients = typedClientsOf(f.Fixture)
}

// typedClients write what users and the snapshot-controller do.
type typedClients struct {
	contents      *gentype.Client[*snapshotv1.VolumeSnapshotContent]
	classes       *gentype.Client[*snapshotv1.VolumeSnapshotClass]
	groupContents *gentype.Client[*groupv1.VolumeGroupSnapshotContent]
	groupClasses  *gentype.Client[*groupv1.VolumeGroupSnapshotClass]
}

func typedClientsOf(f *looptest.Fixture) typedClients {
	f.Helper()
	all, err := newClients(f.ControlPlane.Config())
	f.Must(err)
	snapshots, groups := all[snapshotv1.SchemeGroupVersion], all[groupv1.SchemeGroupVersion]
	return typedClients{
		typedClient(snapshots.contents, func() *snapshotv1.VolumeSnapshotContent { return &snapshotv1.VolumeSnapshotContent{} }),
		typedClient(snapshots.classes, func() *snapshotv1.VolumeSnapshotClass { return &snapshotv1.VolumeSnapshotClass{} }),
		typedClient(groups.contents, func() *groupv1.VolumeGroupSnapshotContent { return &groupv1.VolumeGroupSnapshotContent{} }),
		typedClient(groups.classes, func() *groupv1.VolumeGroupSnapshotClass { return &groupv1.VolumeGroupSnapshotClass{} }),
	}
}

func typedClient[T object](r resource, empty func() T) *gentype.Client[T] {
	return gentype.NewClient(r.Resource, r.GetClient(), runtime.NewParameterCodec(schemeOf()), "", empty)
}

// capabilities returns those of a driver with snapshots.
func capabilities(more ...csi.ControllerServiceCapability_RPC_Type) []csi.ControllerServiceCapability_RPC_Type {
	return append(more, csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT)
}

// scenario starts a snapshotter after it has created the class c1.
func scenario(t *testing.T, plugin csitest.Config, change func(*Config)) *fixture {
	t.Helper()
	f := newFixture(t, plugin, change)
	f.class("c1", map[string]string{"a": "b"})
	f.start()
	return f
}

// start runs the snapshotter as a process does.
func (f *fixture) start() {
	f.Helper()
	f.Start(func(p looptest.Process) (looptest.Loop, error) {
		c, err := New(f.cfg, Deps{
			Driver: p.Driver, Client: p.Client, API: p.Requests, Watches: p.Watches, CSI: p.CSI.Controller(),
			GroupCSI: p.CSI.GroupController(), Ready: p.CSI.WaitReady, Events: f.recorder, Registry: p.Registry, Queues: p.Queues,
		})
		f.c = c
		return served{c}, err
	})
}

func (f *fixture) class(name string, parameters map[string]string) {
	f.Helper()
	f.classOf(name, f.Driver, parameters)
}

func (f *fixture) classOf(name, driver string, parameters map[string]string) {
	f.Helper()
	_, err := f.classes.Create(f.Context(), &snapshotv1.VolumeSnapshotClass{
		ObjectMeta: metav1.ObjectMeta{Name: f.Unique(name)}, Driver: driver, Parameters: parameters,
		DeletionPolicy: snapshotv1.VolumeSnapshotContentDelete,
	}, metav1.CreateOptions{})
	f.Must(err)
}

func (f *fixture) deleteClass(name string) {
	f.Helper()
	f.Must(f.classes.GetClient().Delete().Resource("volumesnapshotclasses").Name(f.Unique(name)).Do(f.Context()).Error())
}

// content creates a dynamic content of the class c1.
func (f *fixture) content(name string, change func(*snapshotv1.VolumeSnapshotContent)) *snapshotv1.VolumeSnapshotContent {
	f.Helper()
	o := &snapshotv1.VolumeSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{Name: f.Unique(name), Finalizers: []string{Finalizer}},
		Spec: snapshotv1.VolumeSnapshotContentSpec{
			VolumeSnapshotRef: corev1.ObjectReference{
				APIVersion: "snapshot.storage.k8s.io/v1", Kind: "VolumeSnapshot", Namespace: f.Namespace, Name: "s1", UID: uid,
			},
			DeletionPolicy: snapshotv1.VolumeSnapshotContentDelete, Driver: f.Driver, VolumeSnapshotClassName: ptr.To(f.Unique("c1")),
			Source: snapshotv1.VolumeSnapshotContentSource{VolumeHandle: ptr.To(f.volume)},
		},
	}
	if change != nil {
		change(o)
	}
	status := o.Status
	o, err := f.contents.Create(f.Context(), o, metav1.CreateOptions{})
	f.Must(err)
	if status != nil {
		o = kubetest.SetStatus(f.T, f.contents, o.Name, status)
	}
	return o
}

// snapshot creates a snapshot of a volume at the driver, and returns its handle.
func (f *fixture) snapshot(name, volume string) string {
	f.Helper()
	response, err := f.Plugin.CreateSnapshot(f.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volume})
	f.Must(err)
	return response.Snapshot.SnapshotId
}

// preProvisioned makes a content pre-provisioned and unbound, with a snapshot that exists.
func (f *fixture) preProvisioned(o *snapshotv1.VolumeSnapshotContent) {
	o.Spec.VolumeSnapshotRef.UID, o.Spec.VolumeSnapshotClassName, o.Finalizers = "", nil, nil
	o.Spec.Source = snapshotv1.VolumeSnapshotContentSource{SnapshotHandle: ptr.To(f.snapshot("s", f.volume))}
}

func retain(o *snapshotv1.VolumeSnapshotContent) {
	o.Spec.DeletionPolicy = snapshotv1.VolumeSnapshotContentRetain
}

func foreign(o *snapshotv1.VolumeSnapshotContent) {
	o.Finalizers = append(o.Finalizers, "example.com/other")
}

// get returns a content, nil if it does not exist.
func (f *fixture) get(ctx context.Context, name string) (*snapshotv1.VolumeSnapshotContent, error) {
	o, err := f.contents.Get(ctx, f.Unique(name), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return o, err
}

// until waits until check accepts the content v1; nil is a deleted one.
func (f *fixture) until(what string, check func(*snapshotv1.VolumeSnapshotContent) bool) *snapshotv1.VolumeSnapshotContent {
	f.Helper()
	return f.untilOf("v1", what, check)
}

func (f *fixture) untilOf(
	name, what string, check func(*snapshotv1.VolumeSnapshotContent) bool,
) (found *snapshotv1.VolumeSnapshotContent) {
	f.Helper()
	kubetest.Eventually(f.T, name+" "+what, func(ctx context.Context) (err error) {
		if found, err = f.get(ctx, name); err != nil {
			return err
		}
		if !check(found) {
			text, _ := json.Marshal(found)
			return fmt.Errorf("it is %s; events %v", text, f.events.all())
		}
		return nil
	})
	return found
}

func isReady(o *snapshotv1.VolumeSnapshotContent) bool {
	return o != nil && o.Status != nil && ptr.Deref(o.Status.ReadyToUse, false) && ptr.Deref(o.Status.SnapshotHandle, "") != "" &&
		o.Status.Error == nil
}

// isComplete reports whether o is ready and the creation has ended.
func isComplete(o *snapshotv1.VolumeSnapshotContent) bool {
	return isReady(o) && !has(o, AnnBeingCreated)
}

func isCreated(o *snapshotv1.VolumeSnapshotContent) bool {
	return o != nil && o.Status != nil && ptr.Deref(o.Status.SnapshotHandle, "") != "" && !has(o, AnnBeingCreated)
}

func isDeleted(o *snapshotv1.VolumeSnapshotContent) bool { return o == nil }

func has(o metav1.Object, annotation string) bool { _, ok := o.GetAnnotations()[annotation]; return ok }

func hasError(parts ...string) func(*snapshotv1.VolumeSnapshotContent) bool {
	return func(o *snapshotv1.VolumeSnapshotContent) bool {
		if o == nil || o.Status == nil || o.Status.Error == nil {
			return false
		}
		return containsAll(ptr.Deref(o.Status.Error.Message, ""), parts...)
	}
}

func containsAll(text string, parts ...string) bool {
	return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(text, part) })
}

// patch changes the content v1 as another component does.
func (f *fixture) patch(name, merge string) {
	f.Helper()
	_, err := f.contents.Patch(f.Context(), f.Unique(name), types.MergePatchType, []byte(merge), metav1.PatchOptions{})
	f.Must(err)
}

func (f *fixture) annotate(name, annotation string, value any) {
	f.Helper()
	text, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{annotation: value}}})
	f.Must(err)
	f.patch(name, string(text))
}

// delete deletes a content as the snapshot-controller does.
func (f *fixture) delete(name string) {
	f.Helper()
	f.annotate(name, AnnBeingDeleted, "yes")
	f.terminate(name)
}

// terminate deletes a content, whose deletion is not released.
func (f *fixture) terminate(name string) {
	f.Helper()
	f.Must(f.contents.GetClient().Delete().Resource("volumesnapshotcontents").Name(f.Unique(name)).Do(f.Context()).Error())
}

// remove deletes a content and then its finalizers: an attempt cannot add a finalizer again after the deletion.
func (f *fixture) remove(name string) {
	f.Helper()
	f.terminate(name)
	f.patch(name, `{"metadata":{"finalizers":null}}`)
}

func (f *fixture) secret(name string, data map[string]string) {
	f.Helper()
	_, err := f.Client.CoreV1().Secrets(f.Namespace).Create(f.Context(),
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, StringData: data}, metav1.CreateOptions{})
	f.Must(err)
}

func (f *fixture) deleteSecret(name string) {
	f.Helper()
	f.Must(f.Client.CoreV1().Secrets(f.Namespace).Delete(f.Context(), name, metav1.DeleteOptions{}))
}

// withSecret names the Secret s in the annotations.
func (f *fixture) withSecret(o *snapshotv1.VolumeSnapshotContent) {
	o.Annotations = map[string]string{AnnSecretName: "s", AnnSecretNamespace: f.Namespace}
}

// notReady creates a content whose snapshot does not become ready.
func (f *fixture) notReady(change func(*snapshotv1.VolumeSnapshotContent)) *snapshotv1.VolumeSnapshotContent {
	f.Helper()
	f.Plugin.Always(createSnapshot, csitest.Alter(func(r *csi.CreateSnapshotResponse) { r.Snapshot.ReadyToUse = false }))
	f.content("v1", change)
	return f.until("is created", func(o *snapshotv1.VolumeSnapshotContent) bool {
		return o.Status != nil && o.Status.SnapshotHandle != nil && !has(o, AnnBeingCreated)
	})
}

// created returns the CreateSnapshot requests so far.
func (f *fixture) created() (requests []*csi.CreateSnapshotRequest) {
	for _, c := range f.Plugin.Calls(createSnapshot) {
		requests = append(requests, c.Request.(*csi.CreateSnapshotRequest))
	}
	return requests
}

// deletions returns the DeleteSnapshot requests so far.
func (f *fixture) deletions() (requests []*csi.DeleteSnapshotRequest) {
	for _, c := range f.Plugin.Calls(removeSnapshot) {
		requests = append(requests, c.Request.(*csi.DeleteSnapshotRequest))
	}
	return requests
}

// noSnapshots fails the test if the driver has snapshots.
func (f *fixture) noSnapshots() {
	f.Helper()
	for _, s := range f.Plugin.Snapshots() {
		if !strings.HasPrefix(s.Name, "quiet") && s.Name != "s" {
			f.Errorf("snapshot of the driver: %+v", s)
		}
	}
}

// quiet reports that the queue has nothing to do: a content that is created now is processed after
// everything before it.
func (f *fixture) quiet() {
	f.Helper()
	name := fmt.Sprintf("quiet%d", time.Now().UnixNano())
	f.content(name, func(o *snapshotv1.VolumeSnapshotContent) {
		f.preProvisioned(o)
		o.Spec.Source.SnapshotHandle = ptr.To(f.snapshot(name, f.volume))
	})
	f.untilOf(name, "is ready", isReady)
}

// events is an EventRecorder.
type events struct {
	mu   sync.Mutex
	list []string
}

func (e *events) Event(object runtime.Object, eventType, reason, message string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, eventType+" "+reason+" "+message)
}

func (e *events) Eventf(object runtime.Object, eventType, reason, format string, args ...any) {
	e.Event(object, eventType, reason, fmt.Sprintf(format, args...))
}

func (e *events) AnnotatedEventf(object runtime.Object, _ map[string]string, eventType, reason, format string, args ...any) {
	e.Event(object, eventType, reason, fmt.Sprintf(format, args...))
}

func (e *events) all() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.list)
}

// with returns the events that contain all parts.
func (e *events) with(parts ...string) []string {
	return slices.DeleteFunc(e.all(), func(text string) bool { return !containsAll(text, parts...) })
}

// waitEvent waits for an event that contains all parts.
func (f *fixture) waitEvent(parts ...string) {
	f.Helper()
	kubetest.Eventually(f.T, fmt.Sprintf("there is an event with %q", parts), func(context.Context) error {
		if len(f.events.with(parts...)) == 0 {
			return fmt.Errorf("there are %v", f.events.all())
		}
		return nil
	})
}

// request is a request of the snapshotter for a snapshot resource.
type request struct {
	method, path, body string
	probe              bool // a list of one object
}

// requests records the requests of the snapshotter for snapshot resources.
type requests struct {
	mu     sync.Mutex
	list   []request
	refuse func(request) int // HTTP status; 0: pass
	alter  func(*request)    // changes the body
}

// refusing answers requests with the status that f returns, unless it is 0.
func (r *requests) refusing(f func(request) int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuse = f
}

// altering changes the bodies of requests, unless f is nil.
func (r *requests) altering(f func(*request)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.alter = f
}

func (r *requests) all(method string) (list []request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.list {
		if one.method == method {
			list = append(list, one)
		}
	}
	return list
}

// writes fails the test unless the snapshotter has sent n writes and reads GETs.
func (f *fixture) writes(n, reads int) {
	f.Helper()
	if got := f.requests.all(http.MethodPatch); len(got) != n {
		f.Errorf("%d writes, want %d: %v", len(got), n, got)
	}
	if got := f.requests.all(http.MethodGet); len(got) != reads {
		f.Errorf("%d reads, want %d: %v", len(got), reads, got)
	}
	if got := f.requests.all(http.MethodPut); len(got) > 0 {
		f.Errorf("updates: %v", got)
	}
}

// recording is the transport of a snapshotter.
type recording struct {
	*requests
	next http.RoundTripper
}

func (r recording) RoundTrip(hr *http.Request) (*http.Response, error) {
	if !strings.Contains(hr.URL.Path, "snapshot.storage.k8s.io") {
		return r.next.RoundTrip(hr)
	}
	one := request{method: hr.Method, path: hr.URL.Path}
	if hr.Body != nil {
		body, err := io.ReadAll(hr.Body)
		if err != nil {
			return nil, err
		}
		one.body, hr.Body = string(body), io.NopCloser(bytes.NewReader(body))
	}
	r.mu.Lock()
	refuse, alter := r.refuse, r.alter
	r.mu.Unlock()
	if alter != nil {
		if alter(&one); hr.Body != nil {
			hr.Body, hr.ContentLength = io.NopCloser(strings.NewReader(one.body)), int64(len(one.body))
		}
	}
	code := 0
	if refuse != nil {
		code = refuse(one)
	}
	if code != 0 {
		return &http.Response{
			StatusCode: code, Status: http.StatusText(code), Header: http.Header{"Content-Type": {"application/json"}}, Request: hr,
			Body: io.NopCloser(strings.NewReader(fmt.Sprintf(
				`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d,"message":"refused"}`,
				map[int]string{403: "Forbidden", 500: "InternalError"}[code], code))),
		}, nil
	}
	r.mu.Lock()
	r.list = append(r.list, one)
	r.mu.Unlock()
	return r.next.RoundTrip(hr)
}

// gate holds back watch events.
type gate struct {
	mu   sync.Mutex
	held chan struct{} // closed when events pass again; nil while they pass
	list []byte        // the response to lists of VolumeSnapshotContents; nil: that of the API server
}

// delayWatches makes the snapshotter watch through a gate.
func (f *fixture) delayWatches() *gate {
	g := &gate{}
	f.Watch = kubetest.Proxy(f, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		g.mu.Lock()
		list := g.list
		g.mu.Unlock()
		switch {
		case list != nil && r.URL.Query().Get("sendInitialEvents") != "":
			http.Error(w, "not supported", http.StatusBadRequest) // so that the snapshotter sends a list request
			return
		case r.URL.Query().Get("watch") != "":
			w = gatedWriter{w, g}
		case list != nil && strings.HasSuffix(r.URL.Path, "/volumesnapshotcontents"):
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(list)
			return
		}
		pass.ServeHTTP(w, r)
	})
	f.Cleanup(g.open)
	return g
}

// freeze makes the snapshotter see the contents as they are now, however they change.
func (g *gate) freeze(f *fixture) {
	g.close()
	list, err := f.contents.GetClient().Get().Resource("volumesnapshotcontents").DoRaw(f.Context())
	f.Must(err)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.list = list
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held == nil {
		g.held = make(chan struct{})
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held != nil {
		close(g.held)
		g.held = nil
	}
}

// gatedWriter writes when the gate is open.
type gatedWriter struct {
	http.ResponseWriter
	g *gate
}

func (w gatedWriter) Write(p []byte) (int, error) {
	w.g.mu.Lock()
	held := w.g.held
	w.g.mu.Unlock()
	if held != nil {
		<-held
	}
	return w.ResponseWriter.Write(p)
}

func (w gatedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// isStatus reports whether r writes a status.
func (r request) isStatus() bool {
	return r.method == http.MethodPatch && strings.HasSuffix(r.path, "/status")
}

// isMetadata reports whether r writes metadata.
func (r request) isMetadata() bool { return r.method == http.MethodPatch && !r.isStatus() }
