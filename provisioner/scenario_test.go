// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr/funcr"
	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/typed/volumesnapshot/v1"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/looptest"
	"github.com/storage-controller/storage-controller/internal/volumerules"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

// fixture runs a provisioner; the test acts as the controllers of Kubernetes. Scenarios run
// in parallel: the names of their cluster-scoped objects begin with the namespace.
type fixture struct {
	*looptest.Fixture
	snapshots snapshotclient.SnapshotV1Interface // needs InstallCRDs
	events    *record.FakeRecorder
	change    func(*Deps)       // before a start, or nil
	logged    func(line string) // receives the log, or nil
	class     string
	cfg       Config
	c         *Controller // of the last start
}

// newFixture returns a fixture whose provisioner does not run yet.
func newFixture(t *testing.T, plugin csitest.Config, change func(*Config)) *fixture {
	t.Helper()
	f := &fixture{Fixture: looptest.New(t, plugin), cfg: DefaultConfig(), events: record.NewFakeRecorder(10000)}
	f.class = f.Unique("fast")
	f.cfg.RetryIntervalStart, f.cfg.RetryIntervalMax = 50*time.Millisecond, 400*time.Millisecond
	if change != nil {
		change(&f.cfg)
	}
	var err error
	f.snapshots, err = snapshotclient.NewForConfig(kube.ForCustomResources(f.ControlPlane.Config()))
	f.Must(err)
	return f
}

// scenario starts a provisioner.
func scenario(t *testing.T, plugin csitest.Config, change func(*Config)) *fixture {
	t.Helper()
	f := newFixture(t, plugin, change)
	f.start()
	return f
}

// start runs the provisioner as a process does.
func (f *fixture) start() {
	f.Helper()
	f.Start(func(p looptest.Process) (_ looptest.Loop, err error) {
		deps := Deps{
			Driver: p.Driver, Client: p.Client, UnthrottledClient: p.Client, Snapshots: f.snapshots, Metadata: p.Metadata,
			Informers: p.Informers,
			CSI:       p.CSI.Controller(), Ready: p.CSI.WaitReady, Events: f.events, Registry: p.Registry, Queues: p.Queues,
		}
		if f.change != nil {
			f.change(&deps)
		}
		if f.cfg.NodeDeployment {
			node, err := p.CSI.NodeInfo(f.Context())
			f.Must(err)
			deps.Segments = node.GetAccessibleTopology().GetSegments()
		}
		if f.c, err = New(f.cfg, deps); err == nil {
			exists := f.c.metrics.classExists
			f.c.metrics.classExists = func(name string) bool { // settles and looksAtAll need series of their own
				return exists(name) || strings.HasSuffix(name, "-none") || strings.Contains(name, "-look-")
			}
		}
		if f.logged == nil {
			return f.c, err
		}
		return loggedLoop{f.c, f.logged}, err
	})
}

// loggedLoop runs the provisioner with a logger that calls logged for each line.
type loggedLoop struct {
	*Controller
	logged func(line string)
}

// Run runs the provisioner until ctx is done.
func (l loggedLoop) Run(ctx context.Context) error {
	log := funcr.New(func(_, line string) { l.logged(line) }, funcr.Options{Verbosity: 2})
	return l.Controller.Run(klog.NewContext(ctx, log))
}

func (f *fixture) makeClass(change func(*storagev1.StorageClass)) {
	f.Helper()
	c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: f.class}, Provisioner: f.Driver}
	if change != nil {
		change(c)
	}
	_, err := f.Client.StorageV1().StorageClasses().Create(f.Context(), c, metav1.CreateOptions{})
	f.Must(err)
}

// claim makes a claim that names the driver as its provisioner.
func (f *fixture) claim(change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	f.Helper()
	pvc := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "data", Annotations: map[string]string{storagehelpers.AnnStorageProvisioner: f.Driver}},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &f.class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}
	if change != nil {
		change(pvc)
	}
	pvc, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Create(f.Context(), pvc, metav1.CreateOptions{})
	f.Must(err)
	return pvc
}

func (f *fixture) deleteClaim() {
	f.Helper()
	f.Must(f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Delete(f.Context(), "data", metav1.DeleteOptions{}))
}

func (f *fixture) patchClaim(patch string) {
	f.Helper()
	_, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Patch(f.Context(), "data", types.MergePatchType, []byte(patch),
		metav1.PatchOptions{})
	f.Must(err)
}

// claimIs waits until the claim, nil if it is deleted, satisfies check.
func (f *fixture) claimIs(what string, check func(*corev1.PersistentVolumeClaim) bool) {
	f.Helper()
	kubetest.Eventually(f.T, "the claim "+what, func(ctx context.Context) error {
		list, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var pvc *corev1.PersistentVolumeClaim
		if len(list.Items) > 0 && !strings.HasPrefix(list.Items[0].Name, lastClaim) {
			pvc = &list.Items[0]
		}
		if !check(pvc) {
			return fmt.Errorf("it is %+v", pvc)
		}
		return nil
	})
}

// released reports whether only Kubernetes, whose controllers do not run here,
// keeps a claim that was deleted.
func released(pvc *corev1.PersistentVolumeClaim) bool {
	return pvc == nil || pvc.DeletionTimestamp != nil && fmt.Sprint(pvc.Finalizers) == "[kubernetes.io/pvc-protection]"
}

// saved waits for the PersistentVolume of a claim.
func (f *fixture) saved(claim *corev1.PersistentVolumeClaim) *corev1.PersistentVolume {
	f.Helper()
	var pv *corev1.PersistentVolume
	kubetest.Eventually(f.T, "the volume is saved", func(ctx context.Context) (err error) {
		pv, err = f.Client.CoreV1().PersistentVolumes().Get(ctx, "pvc-"+string(claim.UID), metav1.GetOptions{})
		return err
	})
	return pv
}

// phase plays the volume controller of Kubernetes.
func (f *fixture) phase(pv *corev1.PersistentVolume, phase corev1.PersistentVolumePhase) {
	f.Helper()
	_, err := f.Client.CoreV1().PersistentVolumes().Patch(f.Context(), pv.Name, types.MergePatchType,
		fmt.Appendf(nil, `{"status":{"phase":%q}}`, phase), metav1.PatchOptions{}, "status")
	f.Must(err)
}

// gone waits until a PersistentVolume is deleted, and removes the protection that the
// controllers of Kubernetes would.
func (f *fixture) gone(pv *corev1.PersistentVolume) {
	f.Helper()
	kubetest.Eventually(f.T, "the PersistentVolume is being deleted and only Kubernetes keeps it", func(ctx context.Context) error {
		got, err := f.Client.CoreV1().PersistentVolumes().Get(ctx, pv.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got.DeletionTimestamp == nil || fmt.Sprint(got.Finalizers) != "[kubernetes.io/pv-protection]" {
			return fmt.Errorf("deletion %v, finalizers %v", got.DeletionTimestamp, got.Finalizers)
		}
		_, err = f.Client.CoreV1().PersistentVolumes().Patch(ctx, pv.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`),
			metav1.PatchOptions{})
		return err
	})
}

// event waits for an event with all of parts, and returns those before it and itself.
func (f *fixture) event(parts ...string) (seen []string) {
	f.Helper()
	limit := time.After(time.Minute)
	for {
		select {
		case e := <-f.events.Events:
			seen = append(seen, e)
			found := true
			for _, p := range parts {
				found = found && strings.Contains(e, p)
			}
			if found {
				return seen
			}
		case <-limit:
			f.Fatalf("no event with %q among %q", parts, seen)
			return nil
		}
	}
}

// knows waits until the provisioner knows a node: it asks the scheduler for another one if the watch has not delivered the node yet.
func (f *fixture) knows(node string) {
	f.Helper()
	kubetest.Eventually(f.T, "node "+node+" is known", func(context.Context) error {
		_, hasNode := f.c.nodes.Get(node)
		_, hasDriver := f.c.csiNodes.Get(node)
		if !hasNode || !hasDriver {
			return errors.New("it is not")
		}
		return nil
	})
}

// lastClaim begins the names of the claims of settles, which sort last.
const lastClaim = "zz-"

// settles waits until a claim made now has been looked at, and so everything before it.
func (f *fixture) settles() {
	f.Helper()
	none := f.Namespace + "-none"
	failed := f.c.metrics.provisionFailed.WithLabelValues(none, "")
	before := testutil.ToFloat64(failed)
	pvc := f.claim(func(c *corev1.PersistentVolumeClaim) {
		c.Name, c.GenerateName, c.Spec.StorageClassName = "", lastClaim, &none
	})
	kubetest.Eventually(f.T, "the queue has come to a later claim", func(context.Context) error {
		if testutil.ToFloat64(failed) == before {
			return errors.New("it has not")
		}
		return nil
	})
	f.Must(f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Delete(f.Context(), pvc.Name, metav1.DeleteOptions{}))
}

const create, remove = "CreateVolume", "DeleteVolume"

func TestProvisionerScenario(t *testing.T) {
	provisionerScenarioLife(t)
	provisionerScenarioRequest(t)
	provisionerScenarioTopology(t)
	provisionerScenarioState(t)
	provisionerScenarioHandles(t)
	provisionerScenarioSource(t)
	provisionerScenarioNode(t)
	provisionerScenarioForged(t)
}

func provisionerScenarioLife(t *testing.T) {
	t.Run("014_016_017_022_not_ours", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(func(c *storagev1.StorageClass) {
			c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)
		})
		f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name, c.Annotations = "no-owner", nil })
		f.claim(func(c *corev1.PersistentVolumeClaim) {
			c.Name, c.Annotations = "other-owner",
				map[string]string{storagehelpers.AnnStorageProvisioner: "other", storagehelpers.AnnBetaStorageProvisioner: f.Driver}
		})
		f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name, c.Spec.VolumeName = "bound", "x" })
		f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name = "no-node" })
		f.claim(func(c *corev1.PersistentVolumeClaim) {
			c.Name, c.Annotations[storagehelpers.AnnSelectedNode] = "empty-node", ""
		})
		f.settles()
		f.Calls(create, 0)
		if n := len(f.events.Events); n > 0 {
			t.Errorf("%d events: %s", n, <-f.events.Events)
		}
		claim := f.claim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = "node" })
		f.saved(claim)
		f.Calls(create, 1)
	})
	t.Run("018_class_comes_later", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, patient)
		claim := f.claim(nil)
		kubetest.Eventually(t, "a failure is counted", func(context.Context) error {
			if n := testutil.ToFloat64(f.c.metrics.provisionFailed.WithLabelValues("", "")); n != 1 {
				return fmt.Errorf("%v are", n)
			}
			return nil
		})
		if n := len(f.events.Events); n > 0 {
			t.Errorf("%d events", n)
		}
		f.makeClass(nil)
		f.saved(claim) // without waiting for the back-off
	})
	t.Run("018_series_per_existing_class", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, patient)
		f.makeClass(nil)
		for i := range 3 {
			f.claim(func(c *corev1.PersistentVolumeClaim) {
				c.Name, c.Spec.StorageClassName = fmt.Sprint("data-", i), ptr.To(f.Unique(fmt.Sprint("absent-", i)))
			})
			f.claim(func(c *corev1.PersistentVolumeClaim) {
				from(ptr.To("example.com"), fmt.Sprint("Kind", i), "x")(c)
				c.Name, c.Spec.StorageClassName = fmt.Sprint("from-", i), ptr.To(f.Unique(fmt.Sprint("absent-", i)))
			})
		}
		kubetest.Eventually(t, "six failures are counted in one series", func(context.Context) error {
			series := testutil.CollectAndCount(f.c.metrics.provisionFailed)
			if n := testutil.ToFloat64(f.c.metrics.provisionFailed.WithLabelValues("", "")); n != 6 || series != 1 {
				return fmt.Errorf("%v are, in %d series", n, series)
			}
			return nil
		})
	})
	t.Run("019_class_by_annotation", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(nil)
		claim := f.claim(func(c *corev1.PersistentVolumeClaim) {
			c.Spec.StorageClassName, c.Annotations[corev1.BetaStorageClassAnnotation] = nil, f.class
		})
		if pv := f.saved(claim); pv.Spec.StorageClassName != f.class {
			t.Errorf("class %q", pv.Spec.StorageClassName)
		}
	})
	t.Run("023_deleted_before_it_began", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.claim(func(c *corev1.PersistentVolumeClaim) { c.Finalizers = []string{"example.com/keep"} })
		f.deleteClaim()
		f.settles() // the class comes by another watch: the deletion must be known when it does
		f.makeClass(nil)
		f.saved(f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name = "other" }))
		f.settles()
		f.Calls(create, 1) // for the other claim
	})
	t.Run("039_048_secret", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(parameters(map[string]string{volumerules.ParameterPrefix + "provisioner-secret-name": "${pvc.name}",
			volumerules.ParameterPrefix + "provisioner-secret-namespace": "${pvc.namespace}"}))
		claim := f.claim(nil)
		f.event("ProvisioningFailed", fmt.Sprintf(`secret "%s/data"`, f.Namespace), "not found")
		f.Calls(create, 0)
		_, err := f.Client.CoreV1().Secrets(f.Namespace).Create(t.Context(),
			&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "data"}, StringData: map[string]string{"k": "v"}}, metav1.CreateOptions{})
		f.Must(err)
		pv := f.saved(claim)
		if r := f.Plugin.Calls(create)[0].Request.(*csi.CreateVolumeRequest); r.Secrets["k"] != "v" {
			t.Errorf("secrets %v", r.Secrets)
		}
		f.phase(pv, corev1.VolumeReleased)
		f.gone(pv)
		if r := f.Plugin.Calls(remove)[0].Request.(*csi.DeleteVolumeRequest); r.Secrets["k"] != "v" {
			t.Errorf("secrets at deletion %v", r.Secrets)
		}
	})
	t.Run("083_repeated_with_equal_arguments", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(create, csitest.Fail(codes.DeadlineExceeded, "slow"), csitest.Fail(codes.DeadlineExceeded, "slow"))
		f.makeClass(nil)
		claim := f.claim(nil)
		f.event("Normal Provisioning")
		f.event("ProvisioningFailed", "rpc error: code = DeadlineExceeded desc = slow")
		f.event("ProvisioningFailed")
		f.event("ProvisioningSucceeded", "pvc-"+string(claim.UID))
		f.saved(claim)
		calls := f.Plugin.Calls(create)
		if len(calls) != 3 || fmt.Sprint(calls[0].Request) != fmt.Sprint(calls[2].Request) {
			t.Errorf("calls %v", calls)
		}
		f.claimIs("is not protected any more", func(c *corev1.PersistentVolumeClaim) bool {
			return c != nil && !isProtected(c) && c.Annotations[kube.AnnProvisioningRequest] == ""
		})
	})
	t.Run("086_claim_deleted_indeterminate_then_success", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(create, csitest.DoAndFail(codes.DeadlineExceeded, "slow"), csitest.Hang())
		f.makeClass(nil)
		claim := f.claim(nil)
		f.Wait(create, 2)
		f.deleteClaim()
		f.claimIs("is kept", func(c *corev1.PersistentVolumeClaim) bool {
			return c != nil && c.DeletionTimestamp != nil && isProtected(c)
		})
		f.Plugin.Release()
		pv := f.saved(claim)
		f.claimIs("is deleted", released)
		if pv.Spec.ClaimRef.UID != claim.UID {
			t.Errorf("claim %v", pv.Spec.ClaimRef)
		}
		f.phase(pv, corev1.VolumeReleased)
		f.gone(pv)
		if n := f.Plugin.VolumeCount(); n != 0 {
			t.Errorf("%d volumes are left", n)
		}
	})
	t.Run("087_088_claim_deleted_then_final_error", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(create, csitest.Fail(codes.Aborted, "pending"), csitest.Hang())
		f.makeClass(nil)
		f.claim(nil)
		f.Wait(create, 2)
		f.Plugin.Next(create, csitest.Fail(codes.Internal, "broken"))
		f.deleteClaim()
		f.Crash() // with an indeterminate call
		f.start()
		f.Wait(create, 3)
		f.claimIs("is deleted", released)
		f.settles()
		f.Calls(create, 3)
	})
	t.Run("089_full_node", func(t *testing.T) {
		f := scenario(t, csitest.Config{Segments: []map[string]string{{"zone": "a"}}}, nil)
		f.Plugin.Always(create, csitest.Fail(codes.ResourceExhausted, "full"))
		f.makeClass(func(c *storagev1.StorageClass) {
			c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)
		})
		node := f.Namespace + "-node"
		f.Must(kubetest.CreateNode(t.Context(), f.Client,
			kubetest.NodeSpec{Name: node, Labels: map[string]string{"zone": "a"}, Driver: f.Driver, TopologyKeys: []string{"zone"}}))
		f.knows(node)
		f.claim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = node })
		f.event("ProvisioningFailed", "code = ResourceExhausted desc = full")
		f.claimIs("has no node any more", func(c *corev1.PersistentVolumeClaim) bool {
			_, has := c.Annotations[storagehelpers.AnnSelectedNode]
			return !has
		})
		f.settles()
		f.Calls(create, 1)
	})
	t.Run("079_080_082_node_comes_and_goes", func(t *testing.T) {
		f := scenario(t, csitest.Config{Segments: []map[string]string{{"zone": "a"}}}, patient)
		f.makeClass(nil)
		claim := f.claim(nil)
		f.event("ProvisioningFailed", "no topology available")
		node := f.Namespace + "-node"
		f.Must(kubetest.CreateNode(t.Context(), f.Client,
			kubetest.NodeSpec{Name: node, Labels: map[string]string{"zone": "a"}, Driver: f.Driver, TopologyKeys: []string{"zone"}}))
		pv := f.saved(claim)
		if pv.Spec.NodeAffinity == nil {
			t.Error("no affinity")
		}
		node = f.Namespace + "-gone" // its CSINode has outlived it
		_, err := f.Client.StorageV1().CSINodes().Create(t.Context(), &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: node},
			Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: f.Driver, NodeID: "x", TopologyKeys: []string{"zone"}}}}},
			metav1.CreateOptions{})
		f.Must(err)
		f.claim(func(c *corev1.PersistentVolumeClaim) {
			c.Name, c.Annotations[storagehelpers.AnnSelectedNode] = "later", node
		})
		kubetest.Eventually(t, "another node is asked for", func(ctx context.Context) error {
			c, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Get(ctx, "later", metav1.GetOptions{})
			if err == nil && c.Annotations[storagehelpers.AnnSelectedNode] != "" {
				err = errors.New("it is not")
			}
			return err
		})
		f.Wait(create, 2) // binding is immediate: then anywhere
	})
	t.Run("091_invalid", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = 10*time.Millisecond, time.Hour })
		f.Plugin.Next(create, csitest.Fail(codes.InvalidArgument, "bad name"))
		f.makeClass(nil)
		claim := f.claim(nil)
		f.event("ProvisioningFailed", "infeasible", "1h0m0s", "code = InvalidArgument desc = bad name")
		f.patchClaim(`{"metadata":{"labels":{"a":"b"}}}`) // an event that changes nothing
		f.settles()
		f.Calls(create, 1)
		f.Must(f.Client.StorageV1().StorageClasses().Delete(t.Context(), f.class, metav1.DeleteOptions{}))
		f.makeClass(nil)
		f.saved(claim)
	})
	t.Run("094_095_restart_indeterminate", func(t *testing.T) {
		for name, deleted := range map[string]bool{"094_claim_kept": false, "095_claim_deleted": true} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				f.Plugin.Next(create, csitest.DoAndFail(codes.Unavailable, "away"), csitest.Hang())
				f.makeClass(nil)
				claim := f.claim(nil)
				f.Wait(create, 2)
				f.Crash()
				if deleted {
					f.deleteClaim()
				}
				f.start()
				f.saved(claim)
				if deleted {
					f.claimIs("is deleted", released)
				}
				if n := f.Plugin.VolumeCount(); n != 1 {
					t.Errorf("%d volumes", n)
				}
			})
		}
	})
	t.Run("rule_1_lease_lost_during_the_first_call", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(create, csitest.DoAndHang())
		f.makeClass(nil)
		claim := f.claim(nil)
		f.Wait(create, 1)
		_ = f.Stop(errors.New("lost the Lease"))
		f.deleteClaim()
		f.claimIs("is kept", func(c *corev1.PersistentVolumeClaim) bool { return c != nil && isProtected(c) })
		f.start()
		pv := f.saved(claim)
		f.claimIs("is deleted", released)
		f.phase(pv, corev1.VolumeReleased)
		f.gone(pv)
		if n := f.Plugin.VolumeCount(); n != 0 {
			t.Errorf("%d volumes are left", n)
		}
	})
	t.Run("096_too_small", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		small := csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.CapacityBytes = 1 })
		f.Plugin.Next(create, small, small)
		f.Plugin.Next(remove, csitest.Fail(codes.Internal, "busy"))
		f.makeClass(nil)
		claim := f.claim(nil)
		f.event("ProvisioningFailed", "requires 1073741824", "busy")
		f.event("ProvisioningFailed", "requires 1073741824")
		f.saved(claim)
		f.Calls(create, 3)
		f.Calls(remove, 3)
	})
	t.Run("098_no_volume", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(create, csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume = nil }),
			csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.VolumeId = "" }))
		f.makeClass(nil)
		claim := f.claim(nil)
		f.event("ProvisioningFailed", "driver bug")
		f.saved(claim)
		f.Calls(create, 3)
	})
	t.Run("101_events_right_after_success", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(nil)
		claim := f.claim(nil)
		f.saved(claim)
		for i := range 20 {
			f.patchClaim(fmt.Sprintf(`{"metadata":{"labels":{"n":"%d"}}}`, i))
		}
		f.settles()
		f.Calls(create, 1)
	})
	t.Run("102_103_106_108_109_life", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(nil)
		pv := f.saved(f.claim(nil))
		if fmt.Sprint(pv.Finalizers) != fmt.Sprint([]string{storagehelpers.PVDeletionProtectionFinalizer, "kubernetes.io/pv-protection"}) &&
			len(pv.Finalizers) != 2 {
			t.Errorf("finalizers %v", pv.Finalizers)
		}
		volumes := f.Client.CoreV1().PersistentVolumes()
		has := func(want bool) {
			t.Helper()
			kubetest.Eventually(t, fmt.Sprint("the finalizer is there: ", want), func(ctx context.Context) error {
				got, err := volumes.Get(ctx, pv.Name, metav1.GetOptions{})
				if err == nil && strings.Contains(fmt.Sprint(got.Finalizers), storagehelpers.PVDeletionProtectionFinalizer) != want {
					err = fmt.Errorf("finalizers %v", got.Finalizers)
				}
				return err
			})
		}
		f.phase(pv, corev1.VolumeBound)
		for policy, want := range map[string]bool{"Retain": false, "Delete": true} {
			_, err := volumes.Patch(t.Context(), pv.Name, types.MergePatchType,
				fmt.Appendf(nil, `{"spec":{"persistentVolumeReclaimPolicy":%q}}`, policy), metav1.PatchOptions{})
			f.Must(err)
			has(want)
		}
		_, err := volumes.Patch(t.Context(), pv.Name, types.MergePatchType, []byte(`{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}`),
			metav1.PatchOptions{})
		f.Must(err)
		has(true)
		f.Must(volumes.Delete(t.Context(), pv.Name, metav1.DeleteOptions{})) // before its claim
		f.Calls(remove, 0)
		f.phase(pv, corev1.VolumeReleased)
		f.gone(pv)
		f.Calls(remove, 1)
	})
	t.Run("112_deletion_fails_with_every_code", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalMax = 50 * time.Millisecond })
		for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
			f.Plugin.Next(remove, csitest.Fail(code, "x"))
		}
		f.makeClass(nil)
		pv := f.saved(f.claim(nil))
		f.phase(pv, corev1.VolumeReleased)
		for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
			f.event("VolumeFailedDelete", "code = "+code.String())
		}
		f.gone(pv)
		f.Calls(remove, 17)
	})
	t.Run("every_code_of_create", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalMax = 50 * time.Millisecond })
		for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
			f.Plugin.Next(create, csitest.Fail(code, "x"))
		}
		f.makeClass(nil)
		claim := f.claim(nil)
		f.saved(claim)
		f.Calls(create, 17)
		f.claimIs("is not protected any more", func(c *corev1.PersistentVolumeClaim) bool { return c != nil && !isProtected(c) })
	})
	t.Run("123_drain", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(create, csitest.Hang())
		f.makeClass(nil)
		claim := f.claim(nil)
		f.Wait(create, 1)
		done := make(chan error, 1)
		go func() { done <- f.Stop(fmt.Errorf("signal: %w", workloop.ErrDrain)) }()
		f.Plugin.Release()
		if err := <-done; !errors.Is(err, workloop.ErrDrain) {
			t.Errorf("got %v", err)
		}
		f.saved(claim)
	})
}
