// Package e2e tests the program as a whole: the built binary, as a process, with
// the real control plane and the scripted driver.
package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

// binary is the program, built once, with the race detector.
var binary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "storage-controller-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "storage-controller")
	out, err := exec.Command("go", "build", "-race", "-o", path, "../../cmd/storage-controller").CombinedOutput()
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
}

func newEnv(t *testing.T, cfg csitest.Config, nodes int) *env {
	t.Helper()
	cp := kubetest.Get(t, kubetest.WithControllerManager(), kubetest.WithScheduler(), kubetest.WithAudit())
	e := &env{t: t, cp: cp, client: cp.Client(), ns: kubetest.Namespace(t, cp)}
	cfg.Name = e.ns + ".example.com"
	if cfg.Segments != nil {
		cfg.Segments = []map[string]string{{cfg.Name + "/zone": "a"}, {cfg.Name + "/zone": "b"}}
	}
	e.plugin = csitest.Run(t, cfg)
	for i := range nodes {
		spec := kubetest.NodeSpec{Name: fmt.Sprintf("%s-%d", e.ns, i), NodeID: fmt.Sprintf("id-%d", i), Driver: cfg.Name,
			Labels: map[string]string{"test": e.ns}}
		if cfg.Segments != nil {
			spec.TopologyKeys = []string{cfg.Name + "/zone"}
			spec.Labels[cfg.Name+"/zone"] = cfg.Segments[i%2][cfg.Name+"/zone"]
		}
		if err := kubetest.MakeNode(t.Context(), e.client, spec); err != nil {
			t.Fatal(err)
		}
		e.nodes = append(e.nodes, spec.Name)
	}
	t.Cleanup(func() {
		for _, n := range e.nodes { // pods of later tests must not land there
			_ = e.client.CoreV1().Nodes().Delete(context.Background(), n, metav1.DeleteOptions{})
		}
	})
	return e
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
	return exec.Command(path, append([]string{subcommand, "--kubeconfig", e.cp.Kubeconfig(), "--csi-address", e.plugin.Address(), "-v=2"}, args...)...)
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
		if strings.Contains(p.log.String(), "DATA RACE") {
			e.t.Error("the program has a data race")
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
