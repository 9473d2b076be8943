// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package e2e tests the program as a whole: the built binary, as a process, with
// the real control plane and the scripted driver.
package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/wrapperspb"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestMain(m *testing.M) {
	// Stories wait for long: with a fixed interval, their checks take more of the CPU than the processes.
	kubetest.PollInterval = func(waited time.Duration) time.Duration {
		return min(max(waited/8, 20*time.Millisecond), 250*time.Millisecond)
	}
	kubetest.Parallel(6)
	kubetest.Main(m)
}

// binary is the program, built once, with the race detector where there is one.
var binary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "storage-controller-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "storage-controller")
	args := []string{"build", "-ldflags=-w", "-o", path}
	if os.Getenv("CGO_ENABLED") != "0" { // else there is no race detector
		args = append(args, "-race")
	}
	out, err := exec.Command("go", append(args, "../../cmd/storage-controller")...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building the program: %w\n%s", err, out)
	}
	return path, nil
})

// env is what a test runs in: a driver and a namespace of its own.
type env struct {
	t      *testing.T
	cp     *kubetest.ControlPlane
	client kubernetes.Interface
	plugin *csitest.Plugin
	ns     string
	nodes  []string
	// segments is those of the driver, nil where there is no topology.
	segments []map[string]string
	// restarted tells that the API server was, which refuses everything until it knows the roles again.
	restarted bool
}

func newEnv(t *testing.T, cfg csitest.Config, nodes int) *env {
	t.Helper()
	return newEnvOn(t, kubetest.Get(t, kubetest.WithControllerManager(), kubetest.WithScheduler(), kubetest.WithAudit()), cfg, nodes)
}

// newEnvOn is newEnv on a control plane of the test.
func newEnvOn(t *testing.T, cp *kubetest.ControlPlane, cfg csitest.Config, nodes int) *env {
	t.Helper()
	e := &env{t: t, cp: cp, client: cp.Client(), ns: kubetest.Namespace(t, cp)}
	cfg.Name = e.ns + ".example.com"
	if cfg.Segments != nil {
		cfg.Segments = []map[string]string{{cfg.Name + "/node": "a"}, {cfg.Name + "/node": "b"}}
	}
	makeAccount(t, e.client, e.ns)
	e.plugin, e.segments = csitest.Run(t, cfg), cfg.Segments
	for range nodes {
		e.addNode()
	}
	t.Cleanup(func() {
		for _, n := range e.nodes { // pods of later tests must not land there
			_ = e.client.CoreV1().Nodes().Delete(context.Background(), n, metav1.DeleteOptions{})
		}
	})
	return e
}

// addNode makes one more node, with the driver, in turn in one of two segments.
func (e *env) addNode() {
	e.t.Helper()
	i := len(e.nodes)
	spec := kubetest.NodeSpec{Name: fmt.Sprintf("%s-%d", e.ns, i), NodeID: fmt.Sprintf("id-%d", i), Driver: e.plugin.Name(),
		Labels: map[string]string{"test": e.ns}}
	if e.segments != nil {
		key := e.plugin.Name() + "/node"
		spec.TopologyKeys, spec.Labels[key] = []string{key}, e.segments[i%2][key]
	}
	e.nodes = append(e.nodes, spec.Name)
	if err := kubetest.CreateNode(e.t.Context(), e.client, spec); err != nil {
		e.t.Fatal(err)
	}
}

// class makes a StorageClass; late means that it waits for a pod.
func (e *env) class(late bool, change func(*storagev1.StorageClass)) string {
	e.t.Helper()
	c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{GenerateName: e.ns + "-"}, Provisioner: e.plugin.Name()}
	if late {
		c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)
	}
	if change != nil {
		change(c)
	}
	c, err := e.client.StorageV1().StorageClasses().Create(e.t.Context(), c, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	return c.Name
}

func (e *env) claim(name, class string) *corev1.PersistentVolumeClaim {
	e.t.Helper()
	pvc, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Create(e.t.Context(), newClaim(name, class), metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	return pvc
}

func newClaim(name, class string) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}
}

func (e *env) deleteClaim(name string) {
	e.t.Helper()
	if err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Delete(e.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		e.t.Fatal(err)
	}
}

// bound waits until a claim is bound and returns the name of its volume.
func (e *env) bound(name string) string {
	e.t.Helper()
	var volume string
	e.eventually("claim "+name+" is bound", func(ctx context.Context) error {
		pvc, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if pvc.Status.Phase != corev1.ClaimBound {
			return fmt.Errorf("it is %s", pvc.Status.Phase)
		}
		volume = pvc.Spec.VolumeName
		return nil
	})
	return volume
}

// volume makes a PersistentVolume without a claim, and its volume at the driver; its name is returned.
func (e *env) volume(name string) string {
	e.t.Helper()
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: e.ns + "-" + name}, Spec: corev1.PersistentVolumeSpec{
		AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource: corev1.PersistentVolumeSource{
			CSI: &corev1.CSIPersistentVolumeSource{Driver: e.plugin.Name(), VolumeHandle: e.plugin.AddVolume(name, 1<<30)},
		},
	}}
	if _, err := e.client.CoreV1().PersistentVolumes().Create(e.t.Context(), pv, metav1.CreateOptions{}); err != nil {
		e.t.Fatal(err)
	}
	return pv.Name
}

func (e *env) attach(name, volume, node string) {
	e.t.Helper()
	va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: e.ns + "-" + name}, Spec: storagev1.VolumeAttachmentSpec{
		Attacher: e.plugin.Name(), NodeName: node, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &volume},
	}}
	if _, err := e.client.StorageV1().VolumeAttachments().Create(e.t.Context(), va, metav1.CreateOptions{}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) detach(name string) {
	e.t.Helper()
	if err := e.client.StorageV1().VolumeAttachments().Delete(e.t.Context(), e.ns+"-"+name, metav1.DeleteOptions{}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) attachments(ctx context.Context) ([]storagev1.VolumeAttachment, error) {
	list, err := e.client.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(va storagev1.VolumeAttachment) bool { return va.Spec.Attacher != e.plugin.Name() }), nil
}

// attached waits until n attachments are attached, and there are no others.
func (e *env) attached(n int) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("%d attachments are attached", n), func(ctx context.Context) error {
		vas, err := e.attachments(ctx)
		if err != nil {
			return err
		}
		attached := 0
		for _, va := range vas {
			if va.Status.Attached {
				attached++
			}
		}
		if attached != n || len(vas) != n {
			return fmt.Errorf("%d of %d are", attached, len(vas))
		}
		return nil
	})
}

func (e *env) volumes(ctx context.Context) ([]corev1.PersistentVolume, error) {
	list, err := e.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(pv corev1.PersistentVolume) bool {
		return pv.Spec.CSI == nil || pv.Spec.CSI.Driver != e.plugin.Name()
	}), nil
}

// agrees waits until driver and API server have the same n volumes, and the
// same attachments.
func (e *env) agrees(n int) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("driver and API server have the same %d volumes", n), func(ctx context.Context) error {
		pvs, err := e.volumes(ctx)
		if err != nil {
			return err
		}
		vas, err := e.attachments(ctx)
		if err != nil {
			return err
		}
		handles := map[string]bool{}
		for _, pv := range pvs {
			handles[pv.Spec.CSI.VolumeHandle] = true
		}
		volumes := e.plugin.Volumes()
		var errs []error
		for _, v := range volumes {
			if !handles[v.ID] {
				errs = append(errs, fmt.Errorf("volume %s (%s) has no PersistentVolume", v.ID, v.Name))
			}
		}
		if len(pvs) != n || len(volumes) != n {
			errs = append(errs, fmt.Errorf("%d PersistentVolumes, %d volumes", len(pvs), len(volumes)))
		}
		if p := e.plugin.Publications(); p != len(vas) {
			errs = append(errs, fmt.Errorf("%d attachments, %d publications", len(vas), p))
		}
		return errors.Join(errs...)
	})
}

func (e *env) eventually(what string, check func(context.Context) error) {
	e.t.Helper()
	kubetest.Eventually(e.t, what, check)
}

// calls fails the test when a method was not called n times.
func (e *env) calls(method string, n int) {
	e.t.Helper()
	if got := e.plugin.Count(method); got != n {
		e.t.Errorf("%s was called %d times, want %d", method, got, n)
	}
}

func (e *env) wait(method string, n int) {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), time.Minute)
	defer cancel()
	if err := e.plugin.Wait(ctx, method, n); err != nil {
		e.t.Fatal(err)
	}
}

// process is a running storage-controller.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	pod    string // by which it is told from other replicas
	log    *logBuffer
	exited chan struct{}
}

// logBuffer is the output of a process, which can be read while it is written.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// logged is what the process has written so far.
func (p *process) logged() string { return p.log.String() }

// replicas numbers the processes, which all have the same host name.
var replicas atomic.Int32

// run starts the program; it is killed at the end of the test, when it still runs.
func (e *env) run(subcommand string, args ...string) *process {
	e.t.Helper()
	return e.start(e.command(subcommand, args...))
}

// command is the program with the flags that it needs here; args win over them.
func (e *env) command(subcommand string, args ...string) *exec.Cmd {
	e.t.Helper()
	path, err := binary()
	if err != nil {
		e.t.Fatal(err)
	}
	return exec.Command(path, append([]string{subcommand, "--kubeconfig", e.kubeconfig(subcommand), "--csi-address", e.plugin.Address(),
		"-v=2"}, args...)...)
}

// linked is command under the name of a sidecar, by a link to the program, with the flags as
// old manifests have them.
func (e *env) linked(name string, args ...string) *exec.Cmd {
	e.t.Helper()
	path, err := binary()
	if err != nil {
		e.t.Fatal(err)
	}
	link := filepath.Join(e.t.TempDir(), name)
	if err := os.Symlink(path, link); err != nil {
		e.t.Fatal(err)
	}
	return exec.Command(link, append([]string{"-kubeconfig=" + e.kubeconfig("all"), "-csi-address=" + e.plugin.Address(), "-v=2",
		"-logtostderr"}, args...)...)
}

// start is run for a command, whose own environment wins.
func (e *env) start(cmd *exec.Cmd) *process {
	e.t.Helper()
	p := &process{t: e.t, cmd: cmd, pod: fmt.Sprintf("replica-%d", replicas.Add(1)), log: &logBuffer{}, exited: make(chan struct{})}
	p.cmd.Env = slices.Concat(os.Environ(), []string{"POD_NAMESPACE=" + e.ns, "KUBECONFIG=", "NODE_NAME=", "POD_NAME=" + p.pod}, cmd.Env)
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		e.t.Fatal(err)
	}
	go func() { _ = p.cmd.Wait(); close(p.exited) }()
	e.t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.exited
		if _, race, has := strings.Cut(p.log.String(), "DATA RACE"); has {
			e.t.Errorf("the program has a data race%s", race[:min(len(race), 5000)])
		}
		if no := refusal.FindString(p.log.String()); no != "" && !e.restarted {
			e.t.Errorf("the shipped permissions do not suffice: %s", no)
		}
		if e.t.Failed() {
			lines := strings.Split(p.log.String(), "\n")
			e.t.Logf("the end of the log of %v:\n%s", cmd.Args, strings.Join(lines[max(0, len(lines)-60):], "\n"))
		}
	})
	return p
}

// kill ends the process as a crash would.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// signal sends s.
func (p *process) signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// code waits for the end of the process and returns its exit code.
func (p *process) code() int {
	p.t.Helper()
	return p.codeWithin(time.Minute)
}

func (p *process) codeWithin(limit time.Duration) int {
	p.t.Helper()
	select {
	case <-p.exited:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(limit):
		p.t.Fatal("the process did not end")
		return -1
	}
}

// lives fails the test when the process has ended.
func (p *process) lives() {
	p.t.Helper()
	select {
	case <-p.exited:
		p.t.Fatalf("the process has ended with code %d", p.cmd.ProcessState.ExitCode())
	default:
	}
}

// says waits until the process has logged text.
func (p *process) says(text string) {
	p.t.Helper()
	kubetest.Eventually(p.t, fmt.Sprintf("the process says %q", text), func(context.Context) error {
		if !strings.Contains(p.logged(), text) {
			return errors.New("it does not")
		}
		return nil
	})
}

// fails waits until the process has ended with an error that contains all of texts.
func (p *process) fails(texts ...string) {
	p.t.Helper()
	p.failsWith(1, texts...)
}

// failsWith is fails for an exit code.
func (p *process) failsWith(want int, texts ...string) {
	p.t.Helper()
	if code := p.code(); code != want {
		p.t.Errorf("exit code %d, want %d", code, want)
	}
	for _, text := range texts {
		if !strings.Contains(p.logged(), text) {
			p.t.Errorf("it does not say %q", text)
		}
	}
	if strings.Contains(p.logged(), "goroutine ") {
		p.t.Error("it dumps stacks")
	}
}

// refuses fails the test unless the program ends because of its flags, before it asks
// the driver anything.
func (e *env) refuses(cmd *exec.Cmd, text string) {
	e.t.Helper()
	e.start(cmd).failsWith(2, text)
	if accepted, _ := e.plugin.Connections(); accepted != 0 {
		e.t.Errorf("%d connections to the driver", accepted)
	}
}

// notReadyAtFirst fails the test unless the program, started, asks a driver once a second
// that says three times that it is not ready.
func (e *env) notReadyAtFirst(cmd *exec.Cmd) {
	e.t.Helper()
	no := csitest.Alter(func(r *csi.ProbeResponse) { r.Ready = wrapperspb.Bool(false) })
	e.plugin.Next("Probe", no, no, no)
	e.start(cmd).says("Connected to the driver")
	calls := e.plugin.Calls("Probe", "GetPluginInfo")
	if len(calls) != 5 || calls[3].Method != "Probe" || calls[4].Method != "GetPluginInfo" {
		e.t.Fatalf("calls %v", calls)
	}
	for i := range 3 {
		if apart := calls[i+1].Began.Sub(calls[i].Began); apart < time.Second {
			e.t.Errorf("asked again after %v", apart)
		}
	}
}

// failsAtFirst fails the test unless the command calls the driver again if the first call of method fails with code.
func (e *env) failsAtFirst(command, method string, code codes.Code) {
	e.t.Helper()
	e.plugin.Next(method, csitest.Fail(code, "I am starting"))
	p := e.run(command)
	p.says("Connected to the driver")
	p.says("I am starting")
	e.calls(method, 2)
}

// needsAName fails the test unless the command exits if the driver has no name.
func (e *env) needsAName(command string) {
	e.t.Helper()
	e.plugin.Next("GetPluginInfo", csitest.Alter(func(r *csi.GetPluginInfoResponse) { r.Name = "" }))
	e.run(command).fails("GetPluginInfo", "empty name")
	e.calls("GetPluginInfo", 1)
}

// The Lease of a test is short, and still long enough for a busy machine.
const (
	leaseDuration = 5 * time.Second
	renewDeadline = 4 * time.Second
	retryPeriod   = 500 * time.Millisecond
)

var election = []string{"--leader-election", fmt.Sprint("--leader-election-lease-duration=", leaseDuration),
	fmt.Sprint("--leader-election-renew-deadline=", renewDeadline), fmt.Sprint("--leader-election-retry-period=", retryPeriod)}

// provisionerLease and attacherLease are the names that the Leases of the sidecars have.
func (e *env) provisionerLease() string { return strings.ReplaceAll(e.plugin.Name(), ".", "-") }

func (e *env) attacherLease() string { return "external-attacher-leader-" + e.provisionerLease() }

// leads waits until p holds the Lease called name, and returns that.
func (e *env) leads(p *process, name string) *coordinationv1.Lease {
	e.t.Helper()
	var lease *coordinationv1.Lease
	e.eventually(p.pod+" leads", func(ctx context.Context) error {
		var err error
		if lease, err = e.lease(ctx, name); err != nil {
			return err
		}
		if holder := ptr.Deref(lease.Spec.HolderIdentity, ""); holder != p.pod {
			return fmt.Errorf("%q does", holder)
		}
		return nil
	})
	return lease
}

func (e *env) lease(ctx context.Context, name string) (*coordinationv1.Lease, error) {
	return e.client.CoordinationV1().Leases(e.ns).Get(ctx, name, metav1.GetOptions{})
}

// expireLease removes the holder of a Lease that a killed process holds, so that a story need not wait until
// the Lease expires. Scenario 047 of the
// nodecontroller waits.
func (e *env) expireLease(name string) {
	e.t.Helper()
	_, err := e.client.CoordinationV1().Leases(e.ns).Patch(e.t.Context(), name, types.MergePatchType,
		[]byte(`{"spec":{"holderIdentity":""}}`), metav1.PatchOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
}

// somebodyLeads waits until the Lease called name is held.
func (e *env) somebodyLeads(name string) *coordinationv1.Lease {
	e.t.Helper()
	var lease *coordinationv1.Lease
	e.eventually("a process is leader", func(ctx context.Context) (err error) {
		if lease, err = e.lease(ctx, name); err == nil && ptr.Deref(lease.Spec.HolderIdentity, "") == "" {
			err = errors.New("no process is")
		}
		return err
	})
	return lease
}

var served = regexp.MustCompile(`Serving metrics and health.*"address": "([^"]+)"`)

// get asks the diagnostics server of the process, which it has with --http-endpoint.
func (p *process) get(path string) (status int, body string) {
	p.t.Helper()
	return p.send(http.MethodGet, path, "")
}

// send sends a request with content to the HTTP endpoint of the process.
func (p *process) send(method, path, content string) (status int, body string) {
	p.t.Helper()
	p.says("Serving metrics and health")
	address := served.FindStringSubmatch(p.logged())
	if address == nil {
		p.t.Fatal("it does not say where it serves")
	}
	request, err := http.NewRequestWithContext(p.t.Context(), method, "http://"+address[1]+path, strings.NewReader(content))
	if err != nil {
		p.t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		p.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

// metrics is what the process shows, by name.
func (p *process) metrics() map[string]*dto.MetricFamily {
	p.t.Helper()
	_, text := p.get("/metrics")
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		p.t.Fatal(err)
	}
	return families
}

// value is that of the counter or gauge with these labels, 0 when there is none.
func (p *process) value(name, labels string) float64 {
	p.t.Helper()
	for _, m := range p.metrics()[name].GetMetric() {
		if labelsOf(m) == labels {
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return 0
}

func labelsOf(m *dto.Metric) string {
	var labels []string
	for _, l := range m.GetLabel() {
		labels = append(labels, l.GetName()+"="+l.GetValue())
	}
	slices.Sort(labels)
	return strings.Join(labels, " ")
}

// family is what the metrics of one name are like: the labels of each, and for histograms
// the bounds of the buckets.
type family struct {
	labels  []string
	kind    dto.MetricType
	buckets []float64
}

// called is the family of the calls of the driver, which are given as "Service/Method Code".
func (e *env) called(calls ...string) family {
	f := family{kind: dto.MetricType_HISTOGRAM, buckets: []float64{.1, .25, .5, 1, 2.5, 5, 10, 15, 25, 50, 120, 300, 600}}
	for _, call := range calls {
		method, code, _ := strings.Cut(call, " ")
		f.labels = append(f.labels, fmt.Sprintf("driver_name=%s grpc_status_code=%s method_name=/csi.v1.%s", e.plugin.Name(), code, method))
	}
	return f
}

// ofEveryRole is the families that a process has with a role that has this Lease and these queues.
func ofEveryRole(lease string, queues ...string) map[string]family {
	var names []string
	for _, q := range queues {
		names = append(names, "name="+q)
	}
	times := prometheus.ExponentialBuckets(1e-8, 10, 10)
	return map[string]family{
		"workqueue_depth":                             {names, dto.MetricType_GAUGE, nil},
		"workqueue_adds_total":                        {names, dto.MetricType_COUNTER, nil},
		"workqueue_retries_total":                     {names, dto.MetricType_COUNTER, nil},
		"workqueue_unfinished_work_seconds":           {names, dto.MetricType_GAUGE, nil},
		"workqueue_longest_running_processor_seconds": {names, dto.MetricType_GAUGE, nil},
		"workqueue_queue_duration_seconds":            {names, dto.MetricType_HISTOGRAM, times},
		"workqueue_work_duration_seconds":             {names, dto.MetricType_HISTOGRAM, times},
		"leader_election_master_status":               {[]string{"name=" + lease}, dto.MetricType_GAUGE, nil},
		"leader_election_slowpath_total":              {[]string{"name=" + lease}, dto.MetricType_COUNTER, nil},
		"promhttp_metric_handler_requests_total":      {[]string{"code=200", "code=500", "code=503"}, dto.MetricType_COUNTER, nil},
		"promhttp_metric_handler_requests_in_flight":  {[]string{""}, dto.MetricType_GAUGE, nil},
		"process_start_time_seconds":                  {[]string{""}, dto.MetricType_GAUGE, nil},
		"go_goroutines":                               {[]string{""}, dto.MetricType_GAUGE, nil},
	}
}

// shows fails the test when metrics of these names are otherwise; there may be others. All
// have to be what Prometheus calls good.
func (p *process) shows(want map[string]family) {
	p.t.Helper()
	families := p.metrics()
	for name, want := range want {
		family := families[name]
		var labels []string
		for _, m := range family.GetMetric() {
			labels = append(labels, labelsOf(m))
			var buckets []float64
			for _, b := range m.GetHistogram().GetBucket() {
				buckets = append(buckets, b.GetUpperBound())
			}
			if want.buckets != nil && !slices.Equal(buckets[:len(buckets)-1], want.buckets) { // the last is that of infinity
				p.t.Errorf("%s has buckets %v, want %v", name, buckets, want.buckets)
			}
		}
		slices.Sort(labels)
		if sorted := slices.Sorted(slices.Values(want.labels)); !slices.Equal(labels, sorted) {
			p.t.Errorf("%s has labels %q, want %q", name, labels, sorted)
		}
		if family != nil && family.GetType() != want.kind {
			p.t.Errorf("%s is a %v, want a %v", name, family.GetType(), want.kind)
		}
	}
	if help := families["csi_sidecar_operations_seconds"].GetHelp(); !strings.HasPrefix(help, "[ALPHA]") {
		p.t.Errorf("help of the alpha metric: %s", help)
	}
	_, text := p.get("/metrics")
	if problems, err := promlint.New(strings.NewReader(text)).Lint(); err != nil || len(problems) > 0 {
		p.t.Errorf("%v, %v", err, problems)
	}
}
