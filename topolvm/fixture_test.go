// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm_test

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

func TestMain(m *testing.M) {
	if os.Getenv(sanityClass) == "" { // the suite refuses it
		kubetest.Parallel(6)
	}
	kubetest.Main(m)
}

const (
	mi = 1 << 20
	gi = 1 << 30
)

// request is one that the service has sent, watches excepted.
type request struct{ verb, resource, name, accept, body string }

// recorder records the requests of one replica, and can answer them.
type recorder struct {
	mu     sync.Mutex
	all    []request
	answer func(request) int // 0: the API server answers
}

// of returns verb and resource of the requests so far, in order.
func (r *recorder) of() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []string
	for _, q := range r.all {
		all = append(all, q.verb+" "+q.resource)
	}
	return all
}

// take returns the requests so far, and forgets them.
func (r *recorder) take() []request {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.all
	r.all = nil
	return all
}

func (r *recorder) intercept(f func(request) int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = f
}

func (r *recorder) hook(w http.ResponseWriter, q *http.Request, pass http.Handler) {
	parts := strings.Split(strings.Trim(q.URL.Path, "/"), "/")
	i := slices.IndexFunc(parts, func(p string) bool { return p == "v1" }) + 1
	body, _ := io.ReadAll(q.Body)
	q.Body = io.NopCloser(strings.NewReader(string(body)))
	one := request{q.Method, parts[i], strings.Join(parts[i+1:], "/"), q.Header.Get("Accept"), string(body)}
	if one.verb == http.MethodGet && one.name == "" {
		one.verb = "LIST"
	}
	r.mu.Lock()
	r.all = append(r.all, one)
	answer := r.answer
	r.mu.Unlock()
	if answer != nil {
		if code := answer(one); code != 0 {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(code)
			reason := map[int]metav1.StatusReason{
				http.StatusForbidden: metav1.StatusReasonForbidden, http.StatusNotFound: metav1.StatusReasonNotFound,
			}[code]
			fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":%d,"reason":%q,"message":"as told"}`, code, reason)
			return
		}
	}
	pass.ServeHTTP(w, q)
}

// replica is one process with the service.
type replica struct {
	csi.ControllerClient
	identity csi.IdentityClient
	service  *topolvm.Service
	registry *prometheus.Registry
	requests *recorder
	watches  *sync.Mutex // held: the watches deliver nothing
	socket   string
	server   *grpc.Server
	capacity *changes
	retried  chan string // claims

	informers *kube.Informers
}

// metric returns the sum of a metric.
func (r *replica) metric(name string) (sum float64) {
	families, _ := r.registry.Gather()
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

// changes records calls of [topolvm.Deps.CapacityChanged].
type changes struct {
	mu   sync.Mutex
	seen map[string]int // by node/class
}

func (c *changes) add(node, class string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen[node+"/"+class]++
}

func (c *changes) known() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.seen)
}

func (c *changes) take() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	seen := c.seen
	c.seen = map[string]int{}
	return seen
}

// fixture is a cluster with its own driver name, so that tests run beside each other.
type fixture struct {
	*replica
	t      testing.TB
	driver string
	key    string // of the topology
	client kubernetes.Interface
	lvs    *topolvm.Client
	nodes  map[string]*topolvmtest.Node
	config func(*topolvm.Config)
	clock  func() time.Time
	gate   *sync.Mutex // of the watches of the first replica; nil: a new one
	admin  *rest.Config

	background context.Context // outlives the test
}

// option changes a fixture before the service starts.
type option func(*fixture)

// named sets the name of the driver. Only one test may use it.
func named(driver string) option { return func(f *fixture) { f.driver = driver } }

// configured changes the configuration of the service.
func configured(change func(*topolvm.Config)) option { return func(f *fixture) { f.config = change } }

// clocked sets the clock of the service.
func clocked(now func() time.Time) option { return func(f *fixture) { f.clock = now } }

var drivers atomic.Int32

// cluster returns a cluster without a service.
func cluster(t testing.TB, options ...option) *fixture {
	t.Helper()
	control := kubetest.Get(t)
	f := &fixture{
		t: t, driver: fmt.Sprintf("t%d.topolvm.io", drivers.Add(1)), client: control.Client(), admin: control.Config(),
		nodes: map[string]*topolvmtest.Node{}, config: func(*topolvm.Config) {}, background: context.WithoutCancel(t.Context()),
	}
	for _, o := range options {
		o(f)
	}
	f.key = "topology." + f.driver + "/node"
	var err error
	f.lvs, err = topolvm.NewClient(f.admin, f.driver)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// start returns a cluster with the nodes a, b and c, and one replica whose caches are synced.
func start(t testing.TB, options ...option) *fixture {
	t.Helper()
	f := cluster(t, options...)
	f.install()
	f.replica = f.run()
	f.synced()
	return f
}

// install adds the resources of the driver and the nodes.
func (f *fixture) install() {
	topolvmtest.Install(f.t, f.client, f.driver)
	for _, name := range []string{"a", "b", "c"} {
		f.addNode(name, topolvmtest.Classes()...)
	}
}

func (f *fixture) addNode(name string, classes ...topolvmtest.Class) *topolvmtest.Node {
	full := strings.ReplaceAll(f.driver, ".", "-") + "-" + name
	f.nodes[name] = topolvmtest.Start(f.t, f.admin, topolvmtest.Config{Driver: f.driver, Name: full, Classes: classes})
	return f.nodes[name]
}

// value returns the topology value of a node.
func (f *fixture) value(name string) string { return f.nodes[name].Name() }

// run starts one more replica.
func (f *fixture) run() *replica {
	f.t.Helper()
	t := f.t
	r := &replica{requests: &recorder{}, watches: &sync.Mutex{}, registry: prometheus.NewRegistry()}
	r.capacity, r.retried = &changes{seen: map[string]int{}}, make(chan string, 100)
	if f.gate != nil {
		r.watches = f.gate
	}
	cfg := topolvm.DefaultConfig()
	cfg.Driver, cfg.Version = f.driver, "1.2.3"
	f.config(&cfg)
	var err error
	r.service, err = topolvm.New(cfg, r.registry)
	if err != nil {
		t.Fatal(err)
	}
	if f.clock != nil {
		topolvm.SetNow(r.service, f.clock)
	}
	r.serve(t)
	requests := kubetest.Proxy(t, f.admin, r.requests.hook)
	watches := kubetest.Proxy(t, f.admin, func(w http.ResponseWriter, q *http.Request, pass http.Handler) {
		pass.ServeHTTP(kubetest.GatedWriter{ResponseWriter: w, Gate: r.watches}, q)
	})
	client, meta, err := kube.NewClients(watches)
	if err != nil {
		t.Fatal(err)
	}
	informers := kube.NewInformers(client, meta, f.driver)
	r.informers = informers
	informers.Retain(topolvm.RetainedFields())
	err = r.service.Attach(t.Context(), topolvm.Deps{
		Requests: requests, Watches: watches, Informers: informers, CapacityChanged: r.capacity.add,
		RetryClaim: func(claim string) { r.retried <- claim },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	informers.Start(ctx)
	t.Cleanup(func() {
		cancel()
		informers.Shutdown()
	})
	return r
}

// serve serves the socket and connects to it.
func (r *replica) serve(t testing.TB) {
	t.Helper()
	dir, err := os.MkdirTemp("", "topolvm") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	r.socket = filepath.Join(dir, "csi.sock")
	listener, err := net.Listen("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	r.server = r.service.Server()
	go func() { _ = r.server.Serve(listener) }()
	conn, err := grpc.NewClient("unix://"+r.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	r.ControllerClient, r.identity = csi.NewControllerClient(conn), csi.NewIdentityClient(conn)
	t.Cleanup(func() {
		conn.Close()
		r.server.Stop()
		os.RemoveAll(dir)
	})
}

// synced waits until the service is ready.
func (f *fixture) synced() {
	f.t.Helper()
	kubetest.Eventually(f.t, "the service is ready", func(ctx context.Context) error {
		response, err := f.identity.Probe(ctx, &csi.ProbeRequest{})
		if err == nil && !response.GetReady().GetValue() {
			err = fmt.Errorf("not ready")
		}
		return err
	})
}

// change changes a request.
type change func(*csi.CreateVolumeRequest)

func size(required int64) change {
	return func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes = required }
}

func limit(bytes int64) change {
	return func(r *csi.CreateVolumeRequest) { r.CapacityRange.LimitBytes = bytes }
}

func fromVolume(id string) change {
	return func(r *csi.CreateVolumeRequest) {
		source := &csi.VolumeContentSource_VolumeSource{VolumeId: id}
		r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: source}}
	}
}

func fromSnapshot(id string) change {
	return func(r *csi.CreateVolumeRequest) {
		source := &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}
		r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: source}}
	}
}

func mount(fsType string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: mode(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}},
	}
}

func block() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: mode(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER), AccessType: &csi.VolumeCapability_Block{
			Block: &csi.VolumeCapability_BlockVolume{},
		},
	}
}

func mode(m csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability_AccessMode {
	return &csi.VolumeCapability_AccessMode{Mode: m}
}

func capable(c ...*csi.VolumeCapability) change {
	return func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = c }
}

// class sets the device class, with the key of the driver.
func (f *fixture) class(name string) change {
	return func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{f.driver + "/device-class": name} }
}

// on requires these nodes, the preferred one first.
func (f *fixture) on(names ...string) change {
	var values []string
	for _, name := range names {
		values = append(values, f.value(name))
	}
	return f.in(values...)
}

// in requires these topology values.
func (f *fixture) in(values ...string) change {
	return func(r *csi.CreateVolumeRequest) {
		r.AccessibilityRequirements = &csi.TopologyRequirement{}
		for _, value := range values {
			segment := &csi.Topology{Segments: map[string]string{f.key: value}}
			r.AccessibilityRequirements.Preferred = append(r.AccessibilityRequirements.Preferred, segment)
			r.AccessibilityRequirements.Requisite = append([]*csi.Topology{segment}, r.AccessibilityRequirements.Requisite...)
		}
	}
}

// request returns a request for a file system of 1 GiB of the class ssd on any node.
func (f *fixture) request(name string, changes ...change) *csi.CreateVolumeRequest {
	r := &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: gi}, VolumeCapabilities: []*csi.VolumeCapability{mount("xfs")},
	}
	f.class("ssd")(r)
	for _, c := range changes {
		c(r)
	}
	return r
}

// callTimeout is long enough for a busy machine.
const callTimeout = 60 * time.Second

// create calls CreateVolume.
func (f *fixture) create(name string, changes ...change) (*csi.Volume, error) {
	return f.createWithin(callTimeout, name, changes...)
}

func (f *fixture) createWithin(d time.Duration, name string, changes ...change) (*csi.Volume, error) {
	ctx, cancel := context.WithTimeout(f.t.Context(), d)
	defer cancel()
	response, err := f.CreateVolume(ctx, f.request(name, changes...))
	f.ended(err)
	return response.GetVolume(), err
}

// ended waits until a call whose deadline has ended at the client has also ended at the service.
func (f *fixture) ended(err error) {
	if status.Code(err) == codes.DeadlineExceeded {
		f.until("the call has ended", func() bool { return topolvm.Idle(f.service) })
	}
}

// created calls CreateVolume, which succeeds.
func (f *fixture) created(name string, changes ...change) *csi.Volume {
	f.t.Helper()
	volume, err := f.create(name, changes...)
	if err != nil {
		f.t.Fatalf("CreateVolume %s: %v", name, err)
	}
	return volume
}

func (f *fixture) delete(id string) error { return f.deleteWithin(callTimeout, id) }

func (f *fixture) deleteWithin(d time.Duration, id string) error {
	ctx, cancel := context.WithTimeout(f.t.Context(), d)
	defer cancel()
	_, err := f.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	f.ended(err)
	return err
}

func (f *fixture) expand(id string, required int64, capability *csi.VolumeCapability) (*csi.ControllerExpandVolumeResponse, error) {
	ctx, cancel := context.WithTimeout(f.t.Context(), callTimeout)
	defer cancel()
	return f.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: required}, VolumeCapability: capability,
	})
}

func (f *fixture) snapshot(name, source string) (*csi.Snapshot, error) {
	ctx, cancel := context.WithTimeout(f.t.Context(), callTimeout)
	defer cancel()
	response, err := f.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: source})
	return response.GetSnapshot(), err
}

// fails fails the test unless err has the code, and its message the words.
func (f *fixture) fails(err error, code codes.Code, words ...string) {
	f.t.Helper()
	if status.Code(err) != code {
		f.t.Fatalf("got %v, want code %v", err, code)
	}
	for _, word := range words {
		if !strings.Contains(status.Convert(err).Message(), word) {
			f.t.Errorf("message %q does not contain %q", status.Convert(err).Message(), word)
		}
	}
}

// lv returns the LogicalVolume, or nil.
func (f *fixture) lv(name string) *topolvm.LogicalVolume {
	f.t.Helper()
	lv, err := f.lvs.Get(f.t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return lv
}

// until waits until check is true.
func (f *fixture) until(what string, check func() bool) {
	f.t.Helper()
	kubetest.Eventually(f.t, what, func(context.Context) error {
		if !check() {
			return fmt.Errorf("not yet")
		}
		return nil
	})
}

// untilDeleted waits until the LogicalVolume does not exist.
func (f *fixture) untilDeleted(name string) {
	f.t.Helper()
	f.until(name+" is deleted", func() bool { return f.lv(name) == nil })
}

// sentOnce checks that the replica has sent exactly one request of a kind, and no other write, however often it has read.
func (r *replica) sentOnce(t *testing.T, want string) {
	t.Helper()
	writes := slices.DeleteFunc(r.requests.of(), func(q string) bool {
		return strings.HasPrefix(q, "GET ") || strings.HasPrefix(q, "LIST ")
	})
	if !slices.Equal(writes, []string{want}) {
		t.Errorf("writes %q, want %q once", writes, want)
	}
}

// sent fails the test unless the service has sent these requests since the last call.
func (r *replica) sent(t testing.TB, want ...string) []request {
	t.Helper()
	got, all := r.requests.of(), r.requests.take()
	if !slices.Equal(got, want) {
		t.Errorf("requests %q, want %q", got, want)
	}
	return all
}

// node returns the name of the node in the topology of v.
func (f *fixture) nodeOf(v *csi.Volume) string {
	for name, node := range f.nodes {
		topology := v.GetAccessibleTopology()
		if len(topology) == 1 && maps.Equal(topology[0].GetSegments(), map[string]string{f.key: node.Name()}) {
			return name
		}
	}
	return fmt.Sprint(v.GetAccessibleTopology())
}

const (
	createLV = "POST logicalvolumes"
	deleteLV = "DELETE logicalvolumes"
	getLV    = "GET logicalvolumes"
	listLVs  = "LIST logicalvolumes"
	patchLV  = "PATCH logicalvolumes"
	getNode  = "GET nodes"
)
