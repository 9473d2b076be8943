// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/looptest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

const (
	expandMethod, modifyMethod = "ControllerExpandVolume", "ControllerModifyVolume"

	canExpand  = csi.ControllerServiceCapability_RPC_EXPAND_VOLUME
	canModify  = csi.ControllerServiceCapability_RPC_MODIFY_VOLUME
	canPublish = csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME
)

// expands, modifies and both are drivers with these capabilities only.
var (
	expands  = csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{canExpand}}
	modifies = csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{canModify}}
	both     = csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{canExpand, canModify}}
	nodeOnly = csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{canPublish},
		Node: []csi.NodeServiceCapability_RPC_Type{csi.NodeServiceCapability_RPC_EXPAND_VOLUME}}
)

// fixture runs a resizer with the claims of a test. Names of cluster-scoped objects begin with the
// namespace; the texts of the fixture leave it out.
type fixture struct {
	*looptest.Fixture
	cfg    Config
	c      *Controller // of the last start
	events *eventLog
	api    *requestLog       // of the resizer
	watch  *requestLog       // of its informers
	spread func(key) float64 // nil: that of the resizer
}

// newFixture returns a fixture whose resizer does not run yet.
func newFixture(t *testing.T, plugin csitest.Config, change func(*Config)) *fixture {
	t.Helper()
	f := &fixture{Fixture: looptest.New(t, plugin), cfg: DefaultConfig(), events: &eventLog{}}
	f.NodeExpansion = true
	f.cfg.RetryIntervalStart, f.cfg.RetryIntervalMax = 50*time.Millisecond, 400*time.Millisecond
	if change != nil {
		change(&f.cfg)
	}
	f.api, f.watch = &requestLog{prefix: f.Namespace + "-"}, &requestLog{prefix: f.Namespace + "-"}
	wrapped := func(log *requestLog) *rest.Config {
		config := f.ControlPlane.Config()
		config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return logged{log, rt} })
		return config
	}
	var err error
	f.API, err = kubernetes.NewForConfig(wrapped(f.api))
	f.Must(err)
	f.Watch = wrapped(f.watch)
	_, err = f.Client.StorageV1().StorageClasses().Create(t.Context(), &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: f.Unique("sc")}, Provisioner: f.Driver, AllowVolumeExpansion: ptr.To(true),
	}, metav1.CreateOptions{})
	f.Must(err)
	return f
}

// scenario starts a resizer.
func scenario(t *testing.T, plugin csitest.Config, change func(*Config)) *fixture {
	t.Helper()
	f := newFixture(t, plugin, change)
	f.start()
	return f
}

// start runs the resizer as a process does, and returns when it works.
func (f *fixture) start() {
	f.Helper()
	f.Start(func(p looptest.Process) (_ looptest.Loop, err error) {
		p.Informers.Retain(kube.RetainedFields{Resize: true})
		f.c, err = New(f.cfg, Deps{
			Driver: p.Driver, Client: p.Client, Metadata: p.Metadata, Informers: p.Informers, CSI: p.CSI.Controller(),
			Ready:  p.CSI.WaitReady,
			Events: f.events, Registry: p.Registry, Queues: p.Queues,
		})
		if f.spread != nil {
			f.c.spread = f.spread
		}
		return f.c, err
	})
	kubetest.Eventually(f.T, "the resizer works", func(context.Context) error {
		if f.c.term.Load() == nil {
			return errors.New("its caches are not synced")
		}
		return nil
	})
}

// restart ends the resizer without finishing anything, and starts it again.
func (f *fixture) restart() {
	f.Helper()
	f.Crash()
	f.Must(f.Plugin.WaitIdle(f.Context()))
	f.api.refuse(nil)
	f.start()
}

func oneWorker(c *Config) { c.Workers = 1 }

func slowly(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour }

// pvName returns the name of the PersistentVolume of a claim.
func (f *fixture) pvName(claim string) string { return f.Unique("pv-" + claim) }

func storage(size string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
}

// create creates a bound claim and its PersistentVolume of 1Gi, and returns the handle of its volume. change
// may change both, also their status.
func (f *fixture) create(name string, change func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume)) (handle string) {
	f.Helper()
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: f.Namespace, Annotations: map[string]string{
			storagehelpers.AnnStorageProvisioner: f.Driver,
		}},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: ptr.To(f.Unique("sc")), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: storage("1Gi")}, VolumeName: f.pvName(name),
		},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, Capacity: storage("1Gi")},
	}
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: f.pvName(name)}, Spec: corev1.PersistentVolumeSpec{
		AccessModes: claim.Spec.AccessModes, Capacity: storage("1Gi"), StorageClassName: f.Unique("sc"),
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource: corev1.PersistentVolumeSource{
			CSI: &corev1.CSIPersistentVolumeSource{Driver: f.Driver, VolumeHandle: f.Plugin.AddVolume(name, 1<<30)},
		},
		ClaimRef: &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: f.Namespace, Name: name},
	}}
	if change != nil {
		change(claim, pv)
	}
	status := claim.Status
	created, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Create(f.Context(), claim, metav1.CreateOptions{})
	f.Must(err)
	if pv.Spec.ClaimRef != nil && pv.Spec.ClaimRef.Name == name && pv.Spec.ClaimRef.UID == "" {
		pv.Spec.ClaimRef.UID = created.UID
	}
	if pv.Name != "" {
		_, err = f.Client.CoreV1().PersistentVolumes().Create(f.Context(), pv, metav1.CreateOptions{})
		f.Must(err)
	}
	kubetest.SetStatus(f.T, f.Client.CoreV1().PersistentVolumeClaims(f.Namespace), name, status)
	if pv.Name != "" && f.c != nil && f.c.term.Load() != nil {
		f.watched(pv.Name)
	}
	if pv.Spec.CSI == nil {
		return ""
	}
	return pv.Spec.CSI.VolumeHandle
}

// watched waits until the watch has delivered a PersistentVolume. Only then is a request of its claim the cause of the first call: a
// request that is delivered after that call ends its back-off.
func (f *fixture) watched(pv string) {
	f.Helper()
	kubetest.Eventually(f.T, "PersistentVolume "+pv+" is watched", func(context.Context) error {
		if _, ok := f.c.volumes.Get(pv); !ok {
			return errors.New("it is not cached")
		}
		return nil
	})
}

// patch patches the spec or metadata of a claim. The admission of the API server may not know a new
// StorageClass yet.
func (f *fixture) patch(name, patch string) {
	f.Helper()
	kubetest.Eventually(f.T, "the claim is patched", func(ctx context.Context) error {
		_, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Patch(ctx, name, types.MergePatchType, []byte(patch),
			metav1.PatchOptions{})
		return err
	})
}

// request changes the requested size of a claim.
func (f *fixture) request(name, size string) {
	f.Helper()
	f.patch(name, fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":%q}}}}`, size))
}

// status changes the status of a claim as another component does.
func (f *fixture) status(name string, change func(*corev1.PersistentVolumeClaim)) {
	f.Helper()
	kubetest.Eventually(f.T, "the status is updated", func(ctx context.Context) error {
		claims := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace)
		claim, err := claims.Get(ctx, name, metav1.GetOptions{})
		if err == nil {
			change(claim)
			_, err = claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{})
		}
		return err
	})
}

// nodeExpands completes an expansion as the kubelet does: to the allocated size.
func (f *fixture) nodeExpands(name string) {
	f.Helper()
	f.status(name, func(c *corev1.PersistentVolumeClaim) {
		c.Status.Capacity = storage(ptr.To(c.Status.AllocatedResources[corev1.ResourceStorage]).String())
		delete(c.Status.AllocatedResourceStatuses, corev1.ResourceStorage)
		removeConditions(c, expansionConditions...)
	})
}

// nodeFails ends an expansion on the node with an infeasible response.
func (f *fixture) nodeFails(name string) {
	f.Helper()
	f.status(name, func(c *corev1.PersistentVolumeClaim) { setResizeStatus(c, nodeInfeasible) })
}

// delete deletes a claim without waiting for the components that protect it.
func (f *fixture) delete(name string) {
	f.Helper()
	claims := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace)
	f.Must(claims.Delete(f.Context(), name, metav1.DeleteOptions{}))
	_, err := claims.Patch(f.Context(), name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		f.Fatal(err)
	}
}

func (f *fixture) claim(name string) *corev1.PersistentVolumeClaim {
	f.Helper()
	claim, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Get(f.Context(), name, metav1.GetOptions{})
	f.Must(err)
	return claim
}

func (f *fixture) pv(claim string) *corev1.PersistentVolume {
	f.Helper()
	pv, err := f.Client.CoreV1().PersistentVolumes().Get(f.Context(), f.pvName(claim), metav1.GetOptions{})
	f.Must(err)
	return pv
}

// describe returns what a resizer writes to a claim and its PersistentVolume: the letters of the contract
// and the conditions in the order of their names.
func (f *fixture) describe(ctx context.Context, name string) (string, error) {
	var parts []string
	add := func(letter, value string) {
		if value != "" {
			parts = append(parts, letter+"="+strings.ReplaceAll(value, f.Namespace+"-", ""))
		}
	}
	size := func(letter string, list corev1.ResourceList) {
		if q, ok := list[corev1.ResourceStorage]; ok {
			add(letter, q.String())
		}
	}
	claim, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		parts = append(parts, "deleted")
		claim = &corev1.PersistentVolumeClaim{}
	case err != nil:
		return "", err
	}
	size("C", claim.Status.Capacity)
	size("A", claim.Status.AllocatedResources)
	add("S", string(claim.Status.AllocatedResourceStatuses[corev1.ResourceStorage]))
	add("K", currentClass(claim))
	if m := claim.Status.ModifyVolumeStatus; m != nil {
		add("M", string(m.Status)+"/"+m.TargetVolumeAttributesClassName)
	}
	add("NodeExpansionNotRequired", claim.Annotations[annNodeExpansionNotRequired])
	pv, err := f.Client.CoreV1().PersistentVolumes().Get(ctx, f.pvName(name), metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	size("P", pv.Spec.Capacity)
	add("PRE", pv.Annotations[annPreResize])
	add("PV", ptr.Deref(pv.Spec.VolumeAttributesClassName, ""))
	var conditions []string
	for _, c := range claim.Status.Conditions {
		conditions = append(conditions, string(c.Type))
	}
	slices.Sort(conditions)
	return strings.Join(append(parts, conditions...), " "), nil
}

// reaches waits until a claim and its PersistentVolume are as described.
func (f *fixture) reaches(name, want string) {
	f.Helper()
	kubetest.Eventually(f.T, name+" reaches "+want, func(ctx context.Context) error {
		got, err := f.describe(ctx, name)
		if err == nil && got != want {
			err = fmt.Errorf("got %s", got)
		}
		return err
	})
}

// is fails the test unless a claim and its PersistentVolume are as described.
func (f *fixture) is(name, want string) {
	f.Helper()
	got, err := f.describe(f.Context(), name)
	f.Must(err)
	if got != want {
		f.Errorf("%s is %q, want %q", name, got, want)
	}
}

const (
	pending  = "S=NodeResizePending"
	progress = "S=ControllerResizeInProgress"
	waitNode = "FileSystemResizePending Resizing"
)

// sizes returns the sizes of the expansions of a claim's volume at the driver.
func (f *fixture) sizes(handle string) string {
	var sizes []string
	for _, c := range f.Plugin.Calls(expandMethod) {
		r, ok := c.Request.(*csi.ControllerExpandVolumeRequest)
		if ok && (handle == "" || r.VolumeId == handle) {
			sizes = append(sizes, resource.NewQuantity(r.CapacityRange.RequiredBytes, resource.BinarySI).String())
		}
	}
	return strings.Join(sizes, " ")
}

// called fails the test unless the driver was called for these sizes.
func (f *fixture) called(want string) {
	f.Helper()
	if got := f.sizes(""); got != want {
		f.Errorf("%s was called for %q, want %q", expandMethod, got, want)
	}
}

// modified fails the test unless the driver was called with these values of the parameter iops.
func (f *fixture) modified(want string) {
	f.Helper()
	var values []string
	for _, c := range f.Plugin.Calls(modifyMethod) {
		if r, ok := c.Request.(*csi.ControllerModifyVolumeRequest); ok {
			values = append(values, r.MutableParameters["iops"])
		}
	}
	if got := strings.Join(values, " "); got != want {
		f.Errorf("%s was called with iops %q, want %q", modifyMethod, got, want)
	}
}

// class creates a VolumeAttributesClass.
func (f *fixture) class(name, iops string) {
	f.Helper()
	f.classOf(name, f.Driver, map[string]string{"iops": iops})
}

func (f *fixture) classOf(name, driver string, parameters map[string]string) {
	f.Helper()
	_, err := f.Client.StorageV1().VolumeAttributesClasses().Create(f.Context(), &storagev1.VolumeAttributesClass{
		ObjectMeta: metav1.ObjectMeta{Name: f.Unique(name)}, DriverName: driver, Parameters: parameters,
	}, metav1.CreateOptions{})
	f.Must(err)
}

// classes creates the classes gold and bronze.
func (f *fixture) classes() {
	f.Helper()
	f.class("gold", "9")
	f.class("bronze", "1")
}

// requestClass changes the class that a claim requests.
func (f *fixture) requestClass(name, class string) {
	f.Helper()
	f.patch(name, fmt.Sprintf(`{"spec":{"volumeAttributesClassName":%q}}`, f.Unique(class)))
}

// secret creates a Secret.
func (f *fixture) secret(name string) {
	f.Helper()
	_, err := f.Client.CoreV1().Secrets(f.Namespace).Create(f.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: name}, StringData: map[string]string{"k": name},
	}, metav1.CreateOptions{})
	f.Must(err)
}

// settles returns when everything that was in the queue before has been processed. It needs one worker.
func (f *fixture) settles() {
	f.Helper()
	name := fmt.Sprintf("fence-%d", time.Now().UnixNano())
	if f.c.driver.expansion == expandsNone {
		f.create(name, func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			c.Spec.VolumeAttributesClassName = ptr.To(f.Unique("no-such-class"))
		})
		f.reaches(name, "C=1Gi M=Pending/ P=1Gi")
		return
	}
	handle := f.create(name, nil)
	f.request(name, "2Gi")
	kubetest.Eventually(f.T, "the fence is expanded", func(context.Context) error {
		if f.c.driver.expansion == expandsController && f.sizes(handle) != "2Gi" {
			return errors.New("not called")
		}
		if q := f.pv(name).Spec.Capacity[corev1.ResourceStorage]; q.String() != "2Gi" {
			return errors.New("not expanded")
		}
		return nil
	})
}

// wrote waits until the resizer has written these objects, in this order: names of claims for their status,
// and of PersistentVolumes. It forgets the writes.
func (f *fixture) wrote(want string) {
	f.Helper()
	kubetest.Eventually(f.T, "the writes are logged", func(context.Context) error {
		if got := f.api.written(); got != want {
			return fmt.Errorf("the resizer wrote %q, want %q", got, want)
		}
		return nil
	})
	f.api.take()
}

// sent waits until the reasons of the events about a claim are as given, in the order of their first
// appearance; a repeated reason has its count.
func (f *fixture) sent(name, want string) {
	f.Helper()
	kubetest.Eventually(f.T, "the events are sent", func(context.Context) error {
		if got := f.events.reasons(name); got != want {
			return fmt.Errorf("got events %q, want %q", got, want)
		}
		return nil
	})
}

// eventLog is a recorder of events.
type eventLog struct {
	mu   sync.Mutex
	list []sentEvent
}

type sentEvent struct{ object, reason, message string }

func (l *eventLog) Event(object runtime.Object, _, reason, message string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	o, _ := meta.Accessor(object)
	l.list = append(l.list, sentEvent{o.GetName(), reason, message})
}

func (l *eventLog) Eventf(object runtime.Object, kind, reason, format string, args ...any) {
	l.Event(object, kind, reason, fmt.Sprintf(format, args...))
}

func (l *eventLog) AnnotatedEventf(object runtime.Object, _ map[string]string, kind, reason, format string, args ...any) {
	l.Event(object, kind, reason, fmt.Sprintf(format, args...))
}

func (l *eventLog) reasons(object string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var order []string
	count := map[string]int{}
	for _, e := range l.list {
		if e.object == object {
			if count[e.reason] == 0 {
				order = append(order, e.reason)
			}
			count[e.reason]++
		}
	}
	for i, reason := range order {
		if n := count[reason]; n > 1 {
			order[i] = fmt.Sprintf("%s*%d", reason, n)
		}
	}
	return strings.Join(order, " ")
}

// messages returns the messages of the events with a reason.
func (l *eventLog) messages(reason string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var messages []string
	for _, e := range l.list {
		if e.reason == reason {
			messages = append(messages, e.message)
		}
	}
	return strings.Join(messages, "\n")
}

// requestLog records the requests of a client.
type requestLog struct {
	prefix string // of names, left out

	mu      sync.Mutex
	running sync.RWMutex // read-locked by each write that was sent to the API server
	writes  []string
	reads   []string // paths
	hook    func(*http.Request) *http.Response
}

// refuse has hook answer requests, if its result is not nil.
func (l *requestLog) refuse(hook func(*http.Request) *http.Response) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hook = hook
}

func (l *requestLog) written() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.writes, " ")
}

// take returns and forgets the writes, also one whose response is on its way.
func (l *requestLog) take() string {
	l.running.Lock()
	defer l.running.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	writes := l.writes
	l.writes = nil
	return strings.Join(writes, " ")
}

// has reports whether a path with this part was read.
func (l *requestLog) has(part string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.reads, func(path string) bool { return strings.Contains(path, part) })
}

// logged is the transport of a client with a log.
type logged struct {
	log  *requestLog
	next http.RoundTripper
}

// RoundTrip sends r and logs it.
func (l logged) RoundTrip(r *http.Request) (*http.Response, error) {
	l.log.mu.Lock()
	hook := l.log.hook
	if r.Method == http.MethodGet {
		l.log.reads = append(l.log.reads, r.URL.Path)
	}
	l.log.mu.Unlock()
	var response *http.Response
	var err error
	if hook != nil {
		response = hook(r)
	}
	if r.Method != http.MethodGet {
		l.log.running.RLock()
		defer l.log.running.RUnlock()
	}
	if response == nil {
		response, err = l.next.RoundTrip(r)
	}
	if r.Method == http.MethodGet || err != nil {
		return response, err
	}
	parts := strings.Split(strings.TrimSuffix(r.URL.Path, "/status"), "/")
	line := strings.TrimPrefix(parts[len(parts)-1], l.log.prefix)
	if response.StatusCode >= http.StatusBadRequest {
		line += fmt.Sprintf("!%d", response.StatusCode)
	}
	l.log.mu.Lock()
	l.log.writes = append(l.log.writes, line)
	l.log.mu.Unlock()
	return response, err
}

// forbidden returns the response of the API server to a request without permission.
func forbidden(r *http.Request) *http.Response {
	return refusal(r, http.StatusForbidden, metav1.StatusReasonForbidden, "refused by the test")
}

// refusal returns a response of the API server to a request that it does not serve.
func refusal(r *http.Request, code int32, reason metav1.StatusReason, message string) *http.Response {
	body, _ := json.Marshal(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: reason,
		Code: code, Message: message,
	})
	return &http.Response{StatusCode: int(code), Request: r, Body: io.NopCloser(bytes.NewReader(body)),
		Header: http.Header{"Content-Type": {runtime.ContentTypeJSON}}}
}

// isWrite reports whether r writes an object whose path has this part.
func isWrite(r *http.Request, part string) bool {
	return r.Method == http.MethodPatch && strings.Contains(r.URL.Path, part)
}

// refuseOnce refuses the nth write of objects whose path has this part.
func (f *fixture) refuseOnce(part string, nth int) {
	var mu sync.Mutex
	n := 0
	f.api.refuse(func(r *http.Request) *http.Response {
		if !isWrite(r, part) {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		if n++; n != nth {
			return nil
		}
		return forbidden(r)
	})
}

// hold blocks the nth write of objects whose path has this part until the resizer is stopped. The result is
// closed when it begins.
func (f *fixture) hold(part string, nth int) <-chan struct{} {
	begun := make(chan struct{})
	var mu sync.Mutex
	n := 0
	f.api.refuse(func(r *http.Request) *http.Response {
		if !isWrite(r, part) {
			return nil
		}
		mu.Lock()
		n++
		mine := n == nth
		mu.Unlock()
		if !mine {
			return nil
		}
		close(begun)
		<-r.Context().Done()
		return nil
	})
	return begun
}

// drain stops the resizer as SIGTERM does.
func (f *fixture) drain() {
	f.Helper()
	_ = f.Stop(workloop.ErrDrain)
}
