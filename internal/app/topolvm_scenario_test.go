// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/audit"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

// pod is a controller pod of TopoLVM: one process of the command topolvm.
type pod struct {
	t                         *testing.T
	client                    kubernetes.Interface
	lvs                       *topolvm.Client
	ns, socket                string
	metrics, health, liveness string // addresses
	drain                     context.CancelCauseFunc
	killed                    atomic.Bool // the API server refuses its requests
	ended                     chan error
}

// startPod starts the command topolvm with further arguments. Its driver is installed.
func startPod(t *testing.T, replacing bool, args ...string) *pod {
	t.Helper()
	return startPodWith(t, kubetest.Get(t).Config(), replacing, args...)
}

// startPodWith does this for a process that reaches the API server with config.
func startPodWith(t *testing.T, config *rest.Config, replacing bool, args ...string) *pod {
	t.Helper()
	cp := kubetest.Get(t)
	kubetest.InstallCRDs(t, cp)
	topolvmtest.Install(t, cp.Client(), topolvm.Driver)
	p := &pod{t: t, client: cp.Client(), ns: kubetest.Namespace(t, cp), ended: make(chan error, 1)}
	var err error
	p.lvs, err = topolvm.NewClient(cp.Config(), topolvm.Driver)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "topolvm") // the name of the directory of t may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p.socket = filepath.Join(dir, "csi.sock")
	p.metrics, p.health, p.liveness = freeAddress(t), freeAddress(t), freeAddress(t)
	for name, value := range map[string]string{"POD_NAME": "controller-" + p.ns, "POD_NAMESPACE": p.ns, "NAMESPACE": p.ns} {
		t.Setenv(name, value)
	}
	selection, flags := Topolvm(replacing), pflag.NewFlagSet("topolvm", pflag.ContinueOnError)
	selection.Register(flags)
	args = append([]string{"--csi-socket=" + p.socket, "--metrics-bind-address=" + p.metrics, "--health-probe-bind-address=" + p.health,
		"--capacity-ownerref-level=-1", "--leader-election-namespace=" + p.ns}, args...)
	if !replacing {
		args = append(args, "--driver-health-endpoint="+p.liveness)
	}
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	c, err := selection.Read(flags, "v1.2.3")
	if err == nil {
		c = c.Enabled()
		c.KeepMemory = true
		c.API = kubetest.Proxy(t, config, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if p.killed.Load() {
				http.Error(w, "the process was killed", http.StatusServiceUnavailable)
				return
			}
			pass.ServeHTTP(w, r)
		})
		err = errors.Join(c.Validate(), c.ValidateEnvironment())
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, drain := context.WithCancelCause(context.WithoutCancel(t.Context()))
	p.drain = drain
	go func() { p.ended <- c.Run(ctx) }()
	t.Cleanup(func() { _ = p.stop() })
	return p
}

// stop ends the process as SIGTERM does, and returns its result.
func (p *pod) stop() error {
	p.drain(fmt.Errorf("terminated: %w", workloop.ErrDrain))
	err := <-p.ended
	p.ended <- err
	return err
}

// kill ends the process without any further request.
func (p *pod) kill() {
	p.killed.Store(true)
	p.drain(errors.New("killed"))
	_ = p.stop()
}

// lastPort is counted up from one that depends on the process.
var lastPort atomic.Int32

// freeAddress returns an address that no other caller gets. Its port is below those of outgoing connections, one of which could
// take it before the process listens there.
func freeAddress(t *testing.T) string {
	lastPort.CompareAndSwap(0, int32(os.Getpid()%20_000))
	for range 1000 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 10_000+lastPort.Add(1)%20_000))
		if err == nil {
			defer l.Close()
			return l.Addr().String()
		}
	}
	t.Fatal("no port is free")
	return ""
}

// get returns the status and the body of an endpoint; 0 if no process listens.
func (p *pod) get(address, path string) (int, string) {
	r, err := http.Get("http://" + address + path)
	if err != nil {
		return 0, err.Error()
	}
	defer r.Body.Close()
	body, _ := io.ReadAll(r.Body)
	return r.StatusCode, string(body)
}

// ready waits until the process is ready, and leads.
func (p *pod) ready() {
	p.t.Helper()
	kubetest.Eventually(p.t, "the process is ready", func(context.Context) error {
		select {
		case err := <-p.ended:
			p.ended <- err
			p.t.Fatalf("the process has ended: %v", err)
		default:
		}
		code, body := p.get(p.health, "/readyz?verbose")
		if code != http.StatusOK {
			return errors.New(body)
		}
		return nil
	})
}

// node starts a fake topolvm-node.
func (p *pod) node(name string) *topolvmtest.Node {
	return topolvmtest.Start(p.t, kubetest.Get(p.t).Config(), topolvmtest.Config{Driver: topolvm.Driver, Name: p.ns + "-" + name,
		Classes: topolvmtest.Classes()})
}

// class creates a StorageClass.
func (p *pod) class() string {
	p.t.Helper()
	name, mode := p.ns+"-class", storagev1.VolumeBindingWaitForFirstConsumer
	_, err := p.client.StorageV1().StorageClasses().Create(p.t.Context(), &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: topolvm.Driver, VolumeBindingMode: &mode, AllowVolumeExpansion: new(true),
		Parameters: map[string]string{topolvm.Driver + "/device-class": "thin"},
	}, metav1.CreateOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { // else later processes report its capacity on each node
		err := p.client.StorageV1().StorageClasses().Delete(context.WithoutCancel(p.t.Context()), name, metav1.DeleteOptions{})
		if err != nil {
			p.t.Error(err)
		}
	})
	return name
}

// claim creates a claim with a selected node.
func (p *pod) claim(name, class, node string) *corev1.PersistentVolumeClaim {
	p.t.Helper()
	return p.copy(name, class, node, nil)
}

// copy creates a claim whose volume is a copy of another.
func (p *pod) copy(name, class, node string, source *corev1.TypedLocalObjectReference) *corev1.PersistentVolumeClaim {
	p.t.Helper()
	claim, err := p.client.CoreV1().PersistentVolumeClaims(p.ns).Create(p.t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{
			"volume.kubernetes.io/selected-node": node, "volume.kubernetes.io/storage-provisioner": topolvm.Driver,
		}},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, DataSource: source,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	return claim
}

// volumeOf waits for the PersistentVolume of a claim.
func (p *pod) volumeOf(claim *corev1.PersistentVolumeClaim) (pv *corev1.PersistentVolume) {
	p.t.Helper()
	kubetest.Eventually(p.t, "claim "+claim.Name+" has a volume", func(ctx context.Context) (err error) {
		pv, err = p.client.CoreV1().PersistentVolumes().Get(ctx, "pvc-"+string(claim.UID), metav1.GetOptions{})
		return err
	})
	return pv
}

// release does what the controllers of Kubernetes do when the claim of a bound volume was deleted, and later the volume.
func (p *pod) release(pv *corev1.PersistentVolume) {
	p.t.Helper()
	volumes := p.client.CoreV1().PersistentVolumes()
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		pv, err := volumes.Get(p.t.Context(), pv.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		pv.Finalizers = slices.DeleteFunc(pv.Finalizers, func(f string) bool { return f == "kubernetes.io/pv-protection" })
		if pv, err = volumes.Update(p.t.Context(), pv, metav1.UpdateOptions{}); err != nil {
			return err
		}
		pv.Status.Phase = corev1.VolumeReleased
		_, err = volumes.UpdateStatus(p.t.Context(), pv, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		p.t.Fatal(err)
	}
}

// controller returns a client of the socket, as a sidecar of the pod has it.
func (p *pod) controller() (csi.ControllerClient, csi.IdentityClient) {
	p.t.Helper()
	conn, err := grpc.NewClient("unix://"+p.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { conn.Close() })
	return csi.NewControllerClient(conn), csi.NewIdentityClient(conn)
}

// TestTopolvmScenario has the scenarios of the whole process. They run one after the other: all have the same driver.
func TestTopolvmScenario(t *testing.T) {
	t.Run("005_068_claim_to_volume_and_back", func(t *testing.T) {
		p := startPod(t, false)
		node, class := p.node("a"), p.class()
		p.ready()
		if file, err := os.Lstat(p.socket); err != nil || file.Mode() != fs.ModeSocket|0o660 {
			t.Errorf("the socket is %v, %v", file, err)
		}
		claim := p.claim("data", class, node.Name())
		pv := p.volumeOf(claim)
		term := pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0]
		if term.Key != "topology."+topolvm.Driver+"/node" || !slices.Equal(term.Values, []string{node.Name()}) || len(node.Volumes()) != 1 {
			t.Errorf("the volume has the node affinity %v, and the node the volumes %v", term, node.Volumes())
		}
		if err := p.client.CoreV1().PersistentVolumeClaims(p.ns).Delete(t.Context(), claim.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		p.release(pv)
		kubetest.Eventually(t, "the volume is deleted", func(ctx context.Context) error {
			_, err := p.client.CoreV1().PersistentVolumes().Get(ctx, pv.Name, metav1.GetOptions{})
			if n := len(node.Volumes()); !apierrors.IsNotFound(err) || n > 0 {
				return fmt.Errorf("PersistentVolume: %v, %d LVM volumes", err, n)
			}
			return nil
		})
		if err := p.stop(); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(p.socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket after the end: %v", err)
		}
	})
	t.Run("004_socket_of_another_process", func(t *testing.T) {
		first := startPod(t, false)
		first.ready()
		second := startPod(t, false, "--csi-socket="+first.socket)
		kubetest.Eventually(t, "the second process has ended", func(context.Context) error {
			select {
			case err := <-second.ended:
				second.ended <- err
				if err == nil || !strings.Contains(err.Error(), "another process accepts connections on "+first.socket) {
					t.Errorf("the second process ends with %v", err)
				}
				return nil
			default:
				return errors.New("it runs")
			}
		})
		first.ready()
	})
	t.Run("083_endpoints", func(t *testing.T) {
		p := startPod(t, false)
		p.ready()
		for address, path := range map[string]string{p.metrics: "/metrics", p.health: "/healthz", p.liveness: "/healthz"} {
			if code, body := p.get(address, path); code != http.StatusOK {
				t.Errorf("%s%s answers %d: %s", address, path, code, body)
			}
		}
		if _, body := p.get(p.metrics, "/metrics"); !strings.Contains(body, "storage_controller_topolvm_panics_total") {
			t.Error("the metrics of the service are missing")
		}
		cfg := csiclient.DefaultConfig()
		cfg.Address = p.socket
		client, err := csiclient.New(cfg, prometheus.NewRegistry())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { client.Close() })
		driver, err := client.Connect(t.Context())
		driver.VendorVersion = ""
		if served := (serviceConfig{Served: true}).served(); err != nil || driver != served {
			t.Errorf("a client reads %+v, doctor assumes %+v: %v", driver, served, err)
		}
	})
	t.Run("085_permissions", func(t *testing.T) {
		a := overlayAuthorizer(t)
		p := startPodWith(t, kubetest.Proxy(t, kubetest.Get(t).Config(), a.serve), false, lostNodes)
		node, class := p.node("a"), p.class()
		p.ready()
		claim := p.claim("data", class, node.Name())
		pv := p.volumeOf(claim)
		p.snapshot(pv)
		p.bind(claim, pv)
		p.clean(node, claim)
		if refused := a.refused(); len(refused) > 0 {
			t.Errorf("not in deploy/overlays/topolvm: %q", refused)
		}
		a.revoke("create logicalvolumes." + topolvm.Driver)
		other := p.node("b")
		controller, _ := p.controller()
		kubetest.Eventually(t, "CreateVolume reports the missing permission", func(ctx context.Context) error {
			_, err := controller.CreateVolume(ctx, volumeRequest(p.ns+"-forbidden", other))
			if grpcstatus.Code(err) != codes.Internal || !strings.Contains(err.Error(), "forbidden") {
				return fmt.Errorf("got %w", err)
			}
			return nil
		})
		p.ready()
	})
	t.Run("063_snapshot_of_a_thick_volume", func(t *testing.T) {
		p := startPod(t, false)
		node := p.node("a")
		p.ready()
		controller, _ := p.controller()
		request := volumeRequest(p.ns+"-thick", node)
		request.Parameters = map[string]string{topolvm.Driver + "/device-class": "ssd"}
		response, err := controller.CreateVolume(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		contents := p.content(response.GetVolume().GetVolumeId())
		kubetest.Eventually(t, "the VolumeSnapshotContent has the error", func(ctx context.Context) error {
			o, err := contents.Get(ctx, p.ns+"-snapshot", metav1.GetOptions{})
			if err != nil {
				return err
			}
			message, _, _ := unstructured.NestedString(o.Object, "status", "error", "message")
			if !strings.Contains(message, "of device class ssd: the device class is not thin") {
				return fmt.Errorf("its status is %v", o.Object["status"])
			}
			_, err = p.lvs.Get(ctx, "snapshot-"+p.ns, metav1.GetOptions{})
			return absent("LogicalVolume", err)
		})
	})
	t.Run("065_clone_on_another_node", func(t *testing.T) {
		p := startPod(t, false, "--strict-topology")
		a, b, class := p.node("a"), p.node("b"), p.class()
		p.ready()
		source := p.claim("source", class, a.Name())
		p.bind(source, p.volumeOf(source))
		clone := p.copy("clone", class, b.Name(), &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: source.Name})
		kubetest.Eventually(t, "the claim has no node", func(ctx context.Context) error {
			claim, err := p.client.CoreV1().PersistentVolumeClaims(p.ns).Get(ctx, clone.Name, metav1.GetOptions{})
			if err == nil && claim.Annotations["volume.kubernetes.io/selected-node"] != "" {
				err = errors.New("it has its node")
			}
			return err
		})
		p.selects(clone, a)
		kubetest.Eventually(t, "the clone is on the node of its source", func(ctx context.Context) error {
			return p.consistent(ctx, 2, "1Gi", a, b)
		})
		if n := len(a.Volumes()); n != 2 {
			t.Errorf("the node of the source has %d LVM volumes", n)
		}
	})
	t.Run("006_every_replica_answers", func(t *testing.T) {
		first := startPod(t, false)
		node := first.node("a")
		first.ready()
		second := startPod(t, false, "--leader-election-namespace="+first.ns)
		second.ready()
		for i, p := range []*pod{first, second} {
			controller, _ := p.controller()
			response, err := controller.CreateVolume(t.Context(), volumeRequest(fmt.Sprintf("%s-%d", p.ns, i), node))
			if err != nil {
				t.Errorf("replica %d: %v", i, err)
				continue
			}
			id := response.GetVolume().GetVolumeId()
			if _, err := controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
				t.Errorf("replica %d: %v", i, err)
			}
		}
	})
	t.Run("003_csidriver", func(t *testing.T) {
		p := startPod(t, false)
		p.ready()
		drivers := p.client.StorageV1().CSIDrivers()
		if err := drivers.Delete(t.Context(), topolvm.Driver, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		_, identity := p.controller()
		kubetest.Eventually(t, "the missing CSIDriver is reported", func(ctx context.Context) error {
			_, err := identity.Probe(ctx, &csi.ProbeRequest{})
			readiness, _ := p.get(p.health, "/readyz/csidriver")
			liveness, _ := p.get(p.liveness, "/healthz")
			if grpcstatus.Code(err) != codes.FailedPrecondition || readiness != http.StatusServiceUnavailable || liveness != http.StatusOK {
				return fmt.Errorf("Probe: %v, readiness %d, liveness %d", err, readiness, liveness)
			}
			return nil
		})
		topolvmtest.Install(t, p.client, topolvm.Driver)
		p.ready()
	})
	t.Run("007_running_calls_end_before_the_watches", func(t *testing.T) {
		p := startPod(t, false)
		node := p.node("a")
		p.ready()
		node.Delay(2 * time.Second)
		controller, _ := p.controller()
		answered := make(chan error, 1)
		go func() {
			_, err := controller.CreateVolume(context.WithoutCancel(t.Context()), volumeRequest(p.ns+"-slow", node))
			answered <- err
		}()
		kubetest.Eventually(t, "the LogicalVolume is created", func(ctx context.Context) error {
			_, err := p.lvs.Get(ctx, p.ns+"-slow", metav1.GetOptions{})
			select {
			case refusal := <-answered:
				t.Fatalf("CreateVolume: %v", refusal)
			default:
			}
			return err
		})
		if err := p.stop(); err != nil {
			t.Error(err)
		}
		if err := <-answered; err != nil {
			t.Errorf("the running call got %v", err)
		}
	})
	t.Run("072_claim_deleted_after_a_kill", func(t *testing.T) {
		const protection = "--provisioning-protection=on-retry"
		p := startPod(t, false, protection)
		node, class := p.node("a"), p.class()
		p.ready()
		node.Stop()
		claim := p.claim("data", class, node.Name())
		name := "pvc-" + string(claim.UID)
		kubetest.Eventually(t, "the LogicalVolume is created", func(ctx context.Context) error {
			_, err := p.lvs.Get(ctx, name, metav1.GetOptions{})
			return err
		})
		p.kill()
		if found := p.audited(name); len(found) > 0 {
			t.Errorf("while the claim is pending, the audit finds %v", found)
		}
		claims := p.client.CoreV1().PersistentVolumeClaims(p.ns)
		if err := claims.Delete(t.Context(), claim.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		claim, err := claims.Get(t.Context(), claim.Name, metav1.GetOptions{})
		if err != nil || !slices.Equal(claim.Finalizers, []string{"kubernetes.io/pvc-protection"}) {
			t.Fatalf("the claim has the finalizers %v, %v", claim.GetFinalizers(), err)
		}
		_, err = claims.Patch(t.Context(), claim.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		if err != nil {
			t.Fatal(err)
		}
		startPod(t, false, protection).ready()
		node.Run()
		p.unreferenced(name, node.Name())
	})
	t.Run("074_unreferenced", func(t *testing.T) { // the gauge is in the scenarios of the service
		p := startPod(t, false, "--audit-interval=100ms")
		node := p.node("a")
		p.ready()
		controller, _ := p.controller()
		name := p.ns + "-left"
		if _, err := controller.CreateVolume(t.Context(), volumeRequest(name, node)); err != nil {
			t.Fatal(err)
		}
		p.unreferenced(name, node.Name())
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: p.ns + "-lost"}}
		pv.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
		pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
		pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: topolvm.Driver, VolumeHandle: "lost"}
		if _, err := p.client.CoreV1().PersistentVolumes().Create(t.Context(), pv, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		kubetest.Eventually(t, "the periodic audit finds a PersistentVolume without a LogicalVolume", func(context.Context) error {
			_, body := p.get(p.metrics, "/metrics")
			const metric = `storage_controller_audit_findings{kind="pv_without_volume"} ` // earlier scenarios leave such objects, too
			if !strings.Contains(body, metric) || strings.Contains(body, metric+"0\n") {
				return errors.New("no such finding")
			}
			return nil
		})
	})
	t.Run("075_a_deleted_node", func(t *testing.T) {
		p := startPod(t, false, lostNodes)
		node, class := p.node("a"), p.class()
		p.node("keep")
		p.ready()
		claim := p.claim("data", class, node.Name())
		pv := p.volumeOf(claim)
		p.bind(claim, pv)
		if err := p.client.CoreV1().Nodes().Delete(t.Context(), node.Name(), metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		kubetest.Eventually(t, "claim, LogicalVolume and Node are deleted", func(ctx context.Context) error {
			claim, err := p.client.CoreV1().PersistentVolumeClaims(p.ns).Get(ctx, claim.Name, metav1.GetOptions{})
			if err == nil && claim.DeletionTimestamp == nil {
				return errors.New("the claim stays")
			}
			if _, err = p.lvs.Get(ctx, pv.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				return fmt.Errorf("LogicalVolume: %v", err)
			}
			if _, err = p.client.CoreV1().Nodes().Get(ctx, node.Name(), metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				return fmt.Errorf("node: %v", err)
			}
			return nil
		})
	})
	t.Run("all_leaves_the_nodecontroller_out", func(t *testing.T) {
		cp := kubetest.Get(t)
		plugin := csitest.Run(t, csitest.Config{Name: topolvm.Driver, Plugin: []csi.PluginCapability_Service_Type{
			csi.PluginCapability_Service_CONTROLLER_SERVICE, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS}})
		c := configOf(t, All, "--csi-address="+plugin.Address(), "--controllers=-provisioner,-resizer,-capacity").Enabled()
		c.API, c.KeepMemory = cp.Config(), true
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		ctx, drain := context.WithCancelCause(context.WithoutCancel(t.Context()))
		found := fmt.Errorf("found: %w", workloop.ErrDrain)
		ctx = klog.NewContext(ctx, funcr.New(func(_, line string) {
			if strings.Contains(line, `"Role disabled" "role"="nodecontroller"`) && strings.Contains(line, "Run the command topolvm") {
				drain(found)
			}
		}, funcr.Options{}))
		limit := time.AfterFunc(time.Minute, func() { drain(workloop.ErrDrain) })
		defer limit.Stop()
		if err := c.Run(ctx); err != nil || !errors.Is(context.Cause(ctx), found) {
			t.Errorf("%v, %v", err, context.Cause(ctx))
		}
	})
	crashScenarios(t)
	nodeScenarios(t)
	claimScenarios(t)
}

// TestNodecontrollerOfTopolvm: for a driver of TopoLVM the role runs only in a process that serves the driver, even if its
// capabilities are not known.
func TestNodecontrollerOfTopolvm(t *testing.T) {
	t.Setenv("NAMESPACE", "ns")
	t.Setenv("POD_NAME", "pod")
	other := csiclient.Driver{Name: "local.example.com", Plugin: csiclient.PluginCapabilities{VolumeAccessibilityConstraints: true}}
	for name, tt := range map[string]struct {
		roles Selection
		args  []string
		want  string // runs, left out, refused or absent
	}{
		"nodecontroller":     {Nodecontroller, nil, "refused"},
		"all":                {All, nil, "left out"},
		"all, other roles":   {All, []string{"--controllers=-attacher"}, "left out"},
		"all, named":         {All, []string{"--controllers=nodecontroller"}, "refused"},
		"topolvm":            {Topolvm(false), nil, "runs"},
		"topolvm, named":     {Topolvm(false), []string{"--controllers=nodecontroller"}, "runs"},
		"topolvm-controller": {Topolvm(true), nil, "runs"},
		"topolvm, without":   {Topolvm(false), []string{"--controllers=-nodecontroller"}, "absent"},
	} {
		for _, driver := range []string{topolvm.Driver, topolvm.LegacyDriver} {
			for _, known := range []bool{false, true} {
				args := tt.args
				if tt.want == "runs" && driver == topolvm.LegacyDriver {
					args = append(slices.Clone(args), "--use-legacy")
				}
				c, d := configOf(t, tt.roles, args...).Enabled(), other
				d.Name = driver
				chosen, others, err := c.choose(d, known)
				var usage *UsageError
				have := "absent"
				switch {
				case err != nil && errors.As(err, &usage):
					have = "refused"
				case contains(chosen, nodecontrollerName):
					have = "runs"
				case slices.ContainsFunc(others, func(s skipped) bool { return s.role == nodecontrollerName }):
					have = "left out"
				}
				plan := c.Plan(d, known)
				failed := slices.ContainsFunc(plan.Findings, func(check finding.Finding) bool {
					return check.Severity == finding.Failing && strings.Contains(check.Message, "Run the command topolvm")
				})
				if failed != (tt.want == "refused") || slices.Contains(filesOf(plan), nodecontrollerName) != (tt.want == "runs") {
					t.Errorf("%s, %s, known %t: doctor plans %+v", name, driver, known, plan.Findings)
				}
				if finalizer := c.unreleased(chosen, driver); (finalizer == driver+"/node") != (have == "absent") {
					t.Errorf("%s, %s, known %t: the finalizer %q stays", name, driver, known, finalizer)
				}
				if have != tt.want {
					t.Errorf("%s, %s, known %t: %s, want %s (%v)", name, driver, known, have, tt.want, err)
				}
			}
		}
		if !tt.roles.service {
			chosen, _, err := configOf(t, tt.roles, tt.args...).Enabled().choose(other, true)
			if err != nil || !contains(chosen, nodecontrollerName) {
				t.Errorf("%s, another driver: %v, %v", name, names(chosen), err)
			}
		}
	}
	if err := configOf(t, All, "--driver-name="+topolvm.Driver).Enabled().Validate(); err != nil {
		t.Errorf("all without the role: %v", err)
	}
}

// bind does what the controllers of Kubernetes do for a claim and its new volume.
func (p *pod) bind(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
	p.t.Helper()
	claims, volumes := p.client.CoreV1().PersistentVolumeClaims(p.ns), p.client.CoreV1().PersistentVolumes()
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		claim, err := claims.Get(p.t.Context(), claim.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		claim.Spec.VolumeName = pv.Name
		if claim, err = claims.Update(p.t.Context(), claim, metav1.UpdateOptions{}); err != nil {
			return err
		}
		claim.Status.Phase, claim.Status.Capacity = corev1.ClaimBound, pv.Spec.Capacity
		_, err = claims.UpdateStatus(p.t.Context(), claim, metav1.UpdateOptions{})
		return err
	})
	if err == nil {
		err = retry.RetryOnConflict(retry.DefaultRetry, func() error {
			pv, err := volumes.Get(p.t.Context(), pv.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			pv.Status.Phase = corev1.VolumeBound
			_, err = volumes.UpdateStatus(p.t.Context(), pv, metav1.UpdateOptions{})
			return err
		})
	}
	if err != nil {
		p.t.Fatal(err)
	}
}

// unreferenced expects that an audit lists the LogicalVolume of a node, which exists.
func (p *pod) unreferenced(name, node string) {
	p.t.Helper()
	found := p.audited(name)
	if len(found) != 1 || found[0].Topic != audit.VolumeWithoutPV || found[0].Node != node {
		p.t.Errorf("the audit finds %+v", found)
	}
	if lv, err := p.lvs.Get(p.t.Context(), name, metav1.GetOptions{}); err != nil || lv.DeletionTimestamp != nil {
		p.t.Errorf("the LogicalVolume does not stay: %v", err)
	}
}

// audited returns what an audit, which does not call the driver, finds in two minutes about a LogicalVolume.
func (p *pod) audited(name string) []audit.Finding {
	p.t.Helper()
	clients, err := apiread.NewClients(kubetest.Get(p.t).Config())
	if err != nil {
		p.t.Fatal(err)
	}
	cfg := audit.DefaultConfig()
	cfg.Settle = time.Millisecond
	report, err := audit.Auditor{
		Config: cfg, Driver: csiclient.Driver{Name: topolvm.Driver}, LogicalVolumes: true, Snapshots: true,
		Read: audit.APIReader{Clients: clients, Driver: topolvm.Driver}.Read,
		Now:  func() time.Time { return time.Now().Add(2 * time.Minute) },
	}.Audit(p.t.Context())
	if err != nil {
		p.t.Fatal(err)
	}
	return slices.DeleteFunc(report.Findings, func(f audit.Finding) bool { return f.Object != "LogicalVolume "+name })
}

// volumeRequest returns a request for a volume on a node.
func volumeRequest(name string, node *topolvmtest.Node) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
		AccessibilityRequirements: &csi.TopologyRequirement{Requisite: []*csi.Topology{
			{Segments: map[string]string{"topology." + topolvm.Driver + "/node": node.Name()}}}},
	}
}
