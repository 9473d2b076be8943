// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/volumerules"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// vanish deletes the claim and takes away the protection that the controllers of
// Kubernetes would: only the provisioner can keep it.
func (f *fixture) vanish() {
	f.Helper()
	f.deleteClaim()
	_, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Patch(f.Context(), "data", types.StrategicMergePatchType,
		[]byte(`{"metadata":{"$deleteFromPrimitiveList/finalizers":["kubernetes.io/pvc-protection"]}}`), metav1.PatchOptions{})
	f.Must(err)
}

func isGone(c *corev1.PersistentVolumeClaim) bool { return c == nil }

// forgotten waits until nothing is remembered of a claim, so that no call can follow.
func (f *fixture) forgotten(claim *corev1.PersistentVolumeClaim) {
	f.Helper()
	kubetest.Eventually(f.T, "the claim is forgotten", func(context.Context) error {
		for key, c := range f.c.claimLoop.Load().ops.All() {
			if key == keyOf(claim) {
				return fmt.Errorf("there is a call in state %s", c.State)
			}
		}
		return nil
	})
}

// volume makes a PersistentVolume of the driver by hand and puts it into phase.
func (f *fixture) volume(name string, phase corev1.PersistentVolumePhase, change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	f.Helper()
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete, StorageClassName: f.class,
			ClaimRef: &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: f.Namespace, Name: "data", UID: "another"},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: f.Driver, VolumeHandle: f.Plugin.AddVolume(name, 1<<30)},
			},
		},
	}
	if change != nil {
		change(pv)
	}
	pv, err := f.Client.CoreV1().PersistentVolumes().Create(f.Context(), pv, metav1.CreateOptions{})
	f.Must(err)
	f.phase(pv, phase)
	return pv
}

func (f *fixture) patchVolume(pv *corev1.PersistentVolume, patch string) {
	f.Helper()
	_, err := f.Client.CoreV1().PersistentVolumes().Patch(f.Context(), pv.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	f.Must(err)
}

// deletions is the calls of DeleteVolume for pv.
func (f *fixture) deletions(pv *corev1.PersistentVolume) (calls []csitest.Call) {
	for _, c := range f.Plugin.Calls(remove) {
		if c.Request.(*csi.DeleteVolumeRequest).GetVolumeId() == pv.Spec.CSI.VolumeHandle {
			calls = append(calls, c)
		}
	}
	return calls
}

func oneWorker(c *Config) { c.WorkerThreads = 1 }

// volumesSettle waits until a volume released now is deleted. With one worker,
// everything that happened to volumes before it has been looked at then.
func (f *fixture) volumesSettle() {
	f.Helper()
	f.gone(f.volume("", corev1.VolumeReleased, func(pv *corev1.PersistentVolume) { pv.GenerateName = f.Namespace + "-last-" }))
}

// through starts the provisioner again, with hook between it and the API server.
func (f *fixture) through(cfg *rest.Config, hook func(http.ResponseWriter, *http.Request, http.Handler)) {
	f.Helper()
	f.Crash()
	api, err := kubernetes.NewForConfig(kubetest.Proxy(f.T, cfg, hook))
	f.Must(err)
	f.API = api
	f.start()
}

// heldUntil answers as step would, but not before gate is closed.
func heldUntil(gate <-chan struct{}, step csitest.Step) csitest.Step {
	return func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
		select {
		case <-gate:
			return step(ctx, p, request, do)
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// distances checks that each call began at least so long after the end of the one before.
func (f *fixture) distances(calls []csitest.Call, want ...time.Duration) {
	f.Helper()
	if len(calls) != len(want)+1 {
		f.Fatalf("%d calls, want %d", len(calls), len(want)+1)
	}
	for i, w := range want {
		if d := calls[i+1].Began.Sub(calls[i].Ended); d < w {
			f.Errorf("call %d came %v after the one before, want %v at least", i+2, d, w)
		}
	}
}

func count(events []string, part string) (n int) {
	for _, e := range events {
		if strings.Contains(e, part) {
			n++
		}
	}
	return n
}

// otherEvents returns the events that the test has not waited for.
func (f *fixture) otherEvents() (events []string) {
	for len(f.events.Events) > 0 {
		events = append(events, <-f.events.Events)
	}
	return events
}

func provisionerScenarioState(t *testing.T) {
	provisionerScenarioEligibility(t)
	provisionerScenarioErrors(t)
	provisionerScenarioAnswers(t)
	provisionerScenarioVolumes(t)
	provisionerScenarioDeletion(t)
}

func provisionerScenarioEligibility(t *testing.T) {
	t.Run("015_beta_annotation_alone", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(nil)
		f.saved(f.claim(func(c *corev1.PersistentVolumeClaim) {
			c.Annotations = map[string]string{storagehelpers.AnnBetaStorageProvisioner: f.Driver}
		}))
	})
	t.Run("018_without_class_retried_in_silence", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		claim := f.claim(nil)
		kubetest.Eventually(t, "three failures are counted", func(context.Context) error {
			if n := f.metric("controller_persistentvolumeclaim_provision_failed_total", "class", ""); n < 3 {
				return fmt.Errorf("%v are", n)
			}
			return nil
		})
		f.makeClass(nil)
		f.saved(claim)
		if events := f.event("ProvisioningSucceeded"); count(events, "Failed") > 0 {
			t.Errorf("events %q", events)
		}
		f.Calls(create, 1)
	})
	t.Run("020_class_of_another_provisioner", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorker)
		f.makeClass(func(c *storagev1.StorageClass) { c.Provisioner = "other.example.com" })
		f.claim(nil)
		good := f.Namespace + "-good"
		f.makeClass(func(c *storagev1.StorageClass) { c.Name = good })
		f.saved(f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name, c.Spec.StorageClassName = "later", &good }))
		f.Calls(create, 1)
		if n := f.metric("workqueue_retries_total", "name", "claims"); n != 0 {
			t.Errorf("%v retries", n)
		}
		if n := f.metric("controller_persistentvolumeclaim_provision_failed_total"); n != 0 {
			t.Errorf("%v failures", n)
		}
		if events := f.event("ProvisioningSucceeded"); count(events, "Failed") > 0 {
			t.Errorf("events %q", events)
		}
	})
	t.Run("021_node_selected_later", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(late)
		claim := f.claim(nil)
		f.settles()
		f.Calls(create, 0)
		f.patchClaim(fmt.Sprintf(`{"metadata":{"annotations":{%q:"node"}}}`, storagehelpers.AnnSelectedNode))
		f.saved(claim)
		f.settles()
		f.Calls(create, 1)
	})
	t.Run("024_selector", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(nil)
		f.claim(func(c *corev1.PersistentVolumeClaim) { c.Spec.Selector = &metav1.LabelSelector{} })
		f.event("ProvisioningFailed", "spec.selector")
		f.event("ProvisioningFailed", "spec.selector") // and again
		f.Calls(create, 0)
	})
	t.Run("025_volume_exists", func(t *testing.T) {
		for _, prefix := range []string{"pvc", "vol"} {
			t.Run(prefix, func(t *testing.T) {
				f := scenario(t, csitest.Config{}, func(c *Config) { c.VolumeNamePrefix = prefix })
				claim := f.claim(nil)
				f.volume(
					prefix+"-"+string(claim.UID), corev1.VolumeAvailable,
					func(pv *corev1.PersistentVolume) { pv.Spec.ClaimRef.UID = claim.UID },
				)
				f.makeClass(nil)
				f.settles()
				f.Calls(create, 0)
				if events := f.otherEvents(); len(events) > 0 {
					t.Errorf("events %q", events)
				}
			})
		}
	})
}

func provisionerScenarioErrors(t *testing.T) {
	t.Run("085_doubling_delays", func(t *testing.T) {
		const start = 200 * time.Millisecond
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = start, time.Hour })
		f.Plugin.Next(create, csitest.Fail(codes.DeadlineExceeded, "slow"), csitest.DoAndFail(codes.DeadlineExceeded, "slow"))
		f.makeClass(nil)
		claim := f.claim(nil)
		if n := count(f.event("ProvisioningSucceeded"), "ProvisioningFailed"); n != 2 {
			t.Errorf("%d failures told, want 2", n)
		}
		f.saved(claim)
		calls := f.Plugin.Calls(create)
		f.distances(calls, start, 2*start)
		for _, c := range calls {
			if name := c.Request.(*csi.CreateVolumeRequest).GetName(); name != "pvc-"+string(claim.UID) {
				t.Errorf("name %q", name)
			}
		}
		if n := f.Plugin.VolumeCount(); n != 1 {
			t.Errorf("%d volumes", n)
		}
	})
	t.Run("086_092_claim_deleted_indeterminate", func(t *testing.T) {
		for _, protection := range []Protection{ProtectionOff, ProtectionOnRetry, ProtectionAlways} {
			for _, code := range []codes.Code{codes.DeadlineExceeded, codes.Aborted, codes.Unavailable, codes.Canceled} {
				t.Run(string(protection)+"_"+code.String(), func(t *testing.T) { claimDeletedIndeterminate(t, code, protection) })
			}
		}
	})
	t.Run("087_088_no_call_after_a_final_error", func(t *testing.T) {
		for _, protection := range []Protection{ProtectionOff, ProtectionOnRetry} {
			t.Run("087_indeterminate_before_"+string(protection), func(t *testing.T) {
				f := scenario(t, csitest.Config{}, func(c *Config) { c.ProvisioningProtection = protection })
				gate := make(chan struct{})
				f.Plugin.Next(create, csitest.Fail(codes.DeadlineExceeded, "slow"), heldUntil(gate, csitest.Fail(codes.Internal, "broken")))
				f.makeClass(nil)
				claim := f.claim(nil)
				f.Wait(create, 2)
				f.vanish()
				close(gate)
				f.event("ProvisioningFailed", "broken")
				f.claimIs("is deleted", isGone)
				f.forgotten(claim)
				f.Calls(create, 2)
			})
		}
		t.Run("088", func(t *testing.T) {
			f := scenario(t, csitest.Config{}, patient)
			f.Plugin.Next(create, csitest.Fail(codes.Internal, "broken"))
			f.makeClass(nil)
			claim := f.claim(nil)
			f.event("ProvisioningFailed", "broken")
			f.vanish() // an event that ends the wait
			f.claimIs("is deleted", isGone)
			f.forgotten(claim)
			f.Calls(create, 1)
		})
	})
	t.Run("089_exhausted_and_nowhere_else_to_go", func(t *testing.T) {
		for name, tt := range map[string]struct {
			plugin csitest.Config
			node   string
		}{
			"immediate":        {plugin: csitest.Config{Segments: []map[string]string{{"zone": "a"}}}},
			"without_topology": {node: "node"},
		} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, tt.plugin, func(c *Config) { c.ImmediateTopology = false })
				f.Plugin.Next(create, csitest.Fail(codes.ResourceExhausted, "full"), csitest.Fail(codes.ResourceExhausted, "full"))
				f.makeClass(func(c *storagev1.StorageClass) {
					if tt.node != "" {
						late(c)
					}
				})
				claim := f.claim(func(c *corev1.PersistentVolumeClaim) {
					if tt.node != "" {
						c.Annotations[storagehelpers.AnnSelectedNode] = tt.node
					}
				})
				if n := count(f.event("ProvisioningSucceeded"), "ProvisioningFailed"); n != 2 {
					t.Errorf("%d failures told, want 2", n)
				}
				f.saved(claim)
				f.Calls(create, 3)
				f.claimIs("has its node", func(c *corev1.PersistentVolumeClaim) bool {
					return c.Annotations[storagehelpers.AnnSelectedNode] == tt.node
				})
			})
		}
	})
	t.Run("090_node_given_back_in_spite_of_a_conflict", func(t *testing.T) {
		for name, tt := range map[string]struct {
			method string // of the write before which the claim is changed
			old    bool   // a ClusterRole without patch: the whole claim is written
			calls  int
		}{
			"patch":  {method: http.MethodPatch, calls: 1}, // which another change does not disturb
			"update": {method: http.MethodPut, old: true, calls: 2},
		} {
			t.Run(name, func(t *testing.T) { nodeGivenBack(t, tt.method, tt.old, tt.calls) })
		}
		t.Run("after_another_selection", func(t *testing.T) {
			f := scenario(t, csitest.Config{Segments: []map[string]string{{"zone": "a"}}}, nil)
			f.Plugin.Next(create, csitest.Fail(codes.ResourceExhausted, "full"))
			f.makeClass(late)
			node, selected := f.zoned("node"), f.zoned("selected-meanwhile")
			f.meanwhile(f.ControlPlane.Config(), http.MethodPatch,
				fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, storagehelpers.AnnSelectedNode, selected))
			claim := f.claim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = node })
			f.saved(claim)
			f.Calls(create, 2)
		})
	})
	t.Run("091_infeasible_and_the_class_was_corrected_meanwhile", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalMax = time.Hour })
		gate := make(chan struct{})
		f.Plugin.Next(create, heldUntil(gate, csitest.Fail(codes.DeadlineExceeded, "slow")),
			csitest.Fail(codes.InvalidArgument, "bad option"))
		f.makeClass(nil)
		claim := f.claim(nil)
		f.Wait(create, 1)
		_, err := f.Client.StorageV1().StorageClasses().Patch(t.Context(), f.class, types.MergePatchType,
			[]byte(`{"mountOptions":["noatime"]}`), metav1.PatchOptions{})
		f.Must(err)
		close(gate)
		f.saved(claim)
		f.Calls(create, 3)
	})
	t.Run("091_infeasible_for_the_longest_interval", func(t *testing.T) {
		const longest = time.Second
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = 10*time.Millisecond, longest })
		f.Plugin.Next(create, csitest.Fail(codes.InvalidArgument, "bad name"), csitest.Fail(codes.InvalidArgument, "bad name"))
		f.makeClass(nil)
		claim := f.claim(nil)
		f.event("ProvisioningFailed", "infeasible", longest.String(), "code = InvalidArgument desc = bad name")
		f.saved(claim)
		f.distances(f.Plugin.Calls(create), longest, longest)
	})
	t.Run("093_claim_and_secret_deleted_indeterminate", func(t *testing.T) {
		for _, protection := range []Protection{ProtectionOff, ProtectionOnRetry} {
			t.Run(string(protection), func(t *testing.T) {
				f := scenario(t, csitest.Config{}, func(c *Config) { c.ProvisioningProtection = protection })
				gate := make(chan struct{})
				f.Plugin.Next(
					create, csitest.DoAndFail(codes.DeadlineExceeded, "slow"),
					heldUntil(gate, csitest.Fail(codes.DeadlineExceeded, "slow")),
				)
				f.makeClass(parameters(map[string]string{
					volumerules.ParameterPrefix + "provisioner-secret-name": "login", volumerules.ParameterPrefix +
						"provisioner-secret-namespace": f.Namespace,
				}))
				f.secret("login", "v")
				claim := f.claim(nil)
				f.Wait(create, 2)
				f.Must(f.Client.CoreV1().Secrets(f.Namespace).Delete(t.Context(), "login", metav1.DeleteOptions{}))
				f.vanish()
				close(gate)
				pv := f.saved(claim)
				f.claimIs("is deleted", isGone)
				calls := f.Plugin.Calls(create)
				if s := calls[len(calls)-1].Request.(*csi.CreateVolumeRequest).GetSecrets(); len(calls) != 3 || s["k"] != "v" {
					t.Errorf("%d calls, secrets of the last one %v", len(calls), s)
				}
				f.phase(pv, corev1.VolumeReleased)
				f.gone(pv)
				if n := f.Plugin.VolumeCount(); n != 0 {
					t.Errorf("%d volumes are left", n)
				}
			})
		}
	})
	t.Run("095_restart_without_protection", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, func(c *Config) {
			c.ProvisioningProtection, c.RetryIntervalStart, c.RetryIntervalMax = ProtectionOff, time.Hour, time.Hour
		})
		f.Plugin.Next(create, csitest.DoAndFail(codes.DeadlineExceeded, "slow"))
		f.makeClass(nil)
		f.claim(nil)
		f.event("ProvisioningFailed", "slow")
		f.Crash()
		f.vanish()
		f.claimIs("is deleted", isGone)
		f.start()
		f.settles()
		f.Calls(create, 1)
		if n := f.Plugin.VolumeCount(); n != 1 { // the leak that this setting allows
			t.Errorf("%d volumes", n)
		}
	})
}

// claimDeletedIndeterminate is the life of a volume whose claim is deleted while it is not
// known whether it exists.
func claimDeletedIndeterminate(t *testing.T, code codes.Code, protection Protection) {
	f := scenario(t, csitest.Config{}, func(c *Config) { c.ProvisioningProtection = protection })
	gate := make(chan struct{})
	f.Plugin.Next(create, csitest.DoAndFail(code, "slow"), heldUntil(gate, csitest.Fail(code, "slow")))
	f.makeClass(nil)
	claim := f.claim(nil)
	f.Wait(create, 2)
	f.vanish()
	kept := protection != ProtectionOff
	f.claimIs(fmt.Sprint("is kept: ", kept), func(c *corev1.PersistentVolumeClaim) bool { return kept == (c != nil && isProtected(c)) })
	close(gate)
	pv := f.saved(claim)
	if ref := pv.Spec.ClaimRef; ref.UID != claim.UID || ref.Name != claim.Name || ref.Namespace != claim.Namespace {
		t.Errorf("claim %v", ref)
	}
	f.claimIs("is deleted", isGone)
	f.phase(pv, corev1.VolumeReleased)
	f.gone(pv)
	f.Calls(create, 3)
	if n := f.Plugin.VolumeCount(); n != 0 {
		t.Errorf("%d volumes are left", n)
	}
}

// zoned creates a node of the driver in zone a.
func (f *fixture) zoned(name string) string {
	f.Helper()
	name = f.Namespace + "-" + name
	f.Must(kubetest.CreateNode(f.Context(), f.Client,
		kubetest.NodeSpec{Name: name, Labels: map[string]string{"zone": "a"}, Driver: f.Driver, TopologyKeys: []string{"zone"}}))
	return name
}

// meanwhile patches the claim right before the first request of the provisioner with that method for it.
func (f *fixture) meanwhile(cfg *rest.Config, method, patch string) {
	f.Helper()
	var once sync.Once
	f.through(cfg, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method == method && strings.HasSuffix(r.URL.Path, "/persistentvolumeclaims/data") {
			once.Do(func() {
				_, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Patch(
					f.Context(), "data", types.MergePatchType, []byte(patch), metav1.PatchOptions{},
				)
				if err != nil {
					f.Error(err)
				}
			})
		}
		pass.ServeHTTP(w, r)
	})
}

// nodeGivenBack changes the claim right before the write that gives its node back.
func nodeGivenBack(t *testing.T, method string, old bool, calls int) {
	f := scenario(t, csitest.Config{Segments: []map[string]string{{"zone": "a"}}}, nil)
	f.Plugin.Always(create, csitest.Fail(codes.ResourceExhausted, "full"))
	f.makeClass(late)
	node := f.zoned("node")
	cfg := f.ControlPlane.Config()
	if old {
		cfg = f.userWith(rbacv1.PolicyRule{
			APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims", "persistentvolumes"},
			Verbs: []string{"get", "list", "update"},
		})
	}
	f.meanwhile(cfg, method, `{"metadata":{"labels":{"a":"b"}}}`)
	claim := f.claim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = node })
	f.claimIs("has no node and keeps the other change", func(c *corev1.PersistentVolumeClaim) bool {
		_, has := c.Annotations[storagehelpers.AnnSelectedNode]
		return !has && c.Labels["a"] == "b"
	})
	f.forgotten(claim)
	f.Calls(create, calls)
	kubetest.Eventually(t, "/statusz shows the failure although nothing is retried", func(context.Context) error {
		failing := f.c.claimLoop.Load().queue.Status().Failing
		if len(failing) != 1 || failing[0].Key != keyOf(claim).String() || !strings.Contains(failing[0].Error, "full") ||
			!failing[0].Next.IsZero() {
			return fmt.Errorf("it shows %+v", failing)
		}
		return nil
	})
	f.patchClaim(`{"spec":{"volumeName":"by-hand"}}`)
	kubetest.Eventually(t, "/statusz shows no failure of a bound claim", func(context.Context) error {
		if failing := f.c.claimLoop.Load().queue.Status().Failing; len(failing) > 0 {
			return fmt.Errorf("it shows %+v", failing)
		}
		return nil
	})
}

func provisionerScenarioAnswers(t *testing.T) {
	for name, sourceOf := range map[string]func(driver, handle string) corev1.PersistentVolumeSource{
		"": func(driver, h string) corev1.PersistentVolumeSource {
			return csiVolume(driver, h).Spec.PersistentVolumeSource
		},
		"in_tree": func(string, string) corev1.PersistentVolumeSource {
			return ebsVolume("vol-2").Spec.PersistentVolumeSource
		},
	} {
		t.Run("volume_of_somebody_else_is_not_cleaned_up_"+name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			gate := make(chan struct{})
			f.Plugin.Next(create, heldUntil(gate, csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.CapacityBytes = 1 })))
			f.makeClass(nil)
			claim := f.claim(nil)
			f.Wait(create, 1)
			_, err := f.Client.CoreV1().PersistentVolumes().Create(t.Context(), &corev1.PersistentVolume{
				ObjectMeta: metav1.ObjectMeta{Name: "pvc-" + string(claim.UID)},
				Spec: corev1.PersistentVolumeSpec{AccessModes: claim.Spec.AccessModes, Capacity: claim.Spec.Resources.Requests,
					PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
					ClaimRef:                      &corev1.ObjectReference{Namespace: f.Namespace, Name: "data", UID: "another"},
					PersistentVolumeSource:        sourceOf(f.Driver, "vol-000001")},
			}, metav1.CreateOptions{})
			f.Must(err)
			close(gate)
			f.event("ProvisioningFailed", "not deleted, because it belongs to PersistentVolume")
			f.Calls(remove, 0)
		})
	}
	t.Run("indeterminate_call_that_cannot_be_recorded_ends", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(create, csitest.DoAndFail(codes.DeadlineExceeded, "slow"))
		f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/persistentvolumeclaims/") {
				http.Error(w, "no", http.StatusInternalServerError)
				return
			}
			pass.ServeHTTP(w, r)
		})
		f.makeClass(nil)
		claim := f.claim(nil)
		f.event("ProvisioningFailed", "adding finalizer storage-controller.io/provisioning")
		f.saved(claim)
		f.Calls(create, 2)
	})
	t.Run("096_too_small_and_the_claim_is_deleted", func(t *testing.T) {
		for name, first := range map[string]csitest.Step{"cleaned_up_at_once": csitest.Default(),
			"cleaned_up_later": csitest.Fail(codes.Internal, "busy")} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				gate := make(chan struct{})
				f.Plugin.Always(create, csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.CapacityBytes-- }))
				f.Plugin.Next(remove, heldUntil(gate, first))
				f.makeClass(nil)
				claim := f.claim(nil)
				f.Wait(remove, 1)
				f.vanish()
				close(gate)
				f.event("ProvisioningFailed", "it has 1073741823 bytes, and the request requires 1073741824")
				f.claimIs("is deleted", isGone)
				f.forgotten(claim)
				f.Calls(create, 1)
				for _, c := range f.Plugin.Calls(remove) {
					if id := c.Request.(*csi.DeleteVolumeRequest).GetVolumeId(); id != "vol-000001" {
						t.Errorf("volume %q was deleted", id)
					}
				}
				if n := f.Plugin.VolumeCount(); n != 0 {
					t.Errorf("%d volumes are left", n)
				}
			})
		}
	})
	t.Run("097_capacity", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(nil)
		for i, tt := range []struct {
			bytes int64
			want  string
		}{{0, "1Gi"}, {1 << 30, "1Gi"}, {5905580032, "5632Mi"}, {5970004541, "5970004541"}, {math.MaxInt64, "9223372036854775807"}} {
			f.Plugin.Next(create, csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.CapacityBytes = tt.bytes }))
			pv := f.saved(f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name = fmt.Sprint("data-", i) }))
			if got := pv.Spec.Capacity.Storage().String(); got != tt.want {
				t.Errorf("%d bytes: capacity %s, want %s", tt.bytes, got, tt.want)
			}
		}
		f.event("UnlikelyCapacity", "capacity_bytes 9223372036854775807 for volume", "for a request of 1073741824 bytes")
	})
	t.Run("099_volume_that_cannot_be_saved_at_once", func(t *testing.T) {
		for name, tt := range map[string]saving{
			"rejected":                     {},
			"rejected_and_claim_deleted":   {gone: true},
			"saved_but_the_answer_lost":    {lost: true},
			"saved_and_retained_meanwhile": {lost: true, gone: true, retain: true},
			"saved_and_deleted_meanwhile":  {lost: true, gone: true, deleted: true},
			"saved_and_being_deleted":      {lost: true, deleted: true},
			"saved_and_deleted":            {lost: true, deleted: true, finalized: true},
			"saved_and_deleted_with_claim": {lost: true, gone: true, deleted: true, finalized: true},
			"migrated_but_the_answer_lost": {lost: true, migrated: true},
		} {
			t.Run(name, func(t *testing.T) { savedLater(t, tt) })
		}
	})
	// The process before this one has removed its record after a result: a repetition would create a volume without a record.
	t.Run("record_removed_before_the_repetition", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Always(create, csitest.Fail(codes.DeadlineExceeded, "no answer"))
		f.makeClass(nil)
		f.claim(nil)
		f.claimIs("is protected", isProtected)
		var removed atomic.Bool
		before := 0
		f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			ofClaim := r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/persistentvolumeclaims/data")
			if ofClaim && removed.CompareAndSwap(false, true) {
				before = len(f.Plugin.Calls(create))
				f.deleteClaim()
				f.patchClaim(`{"metadata":{"finalizers":null}}`)
			}
			pass.ServeHTTP(w, r)
		})
		f.claimIs("is deleted", func(c *corev1.PersistentVolumeClaim) bool { return c == nil })
		f.settles()
		f.settles()
		f.Calls(create, before)
	})
	t.Run("finalizer_of_a_claim_kept_without_permission", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		var granted atomic.Bool
		f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if f.Plugin.VolumeCount() > 0 && !granted.Load() && strings.Contains(r.URL.Path, "/persistentvolumeclaims/") &&
				(r.Method == http.MethodPatch || r.Method == http.MethodPut) {
				refuse(w, apierrors.NewForbidden(schema.GroupResource{Resource: "persistentvolumeclaims"}, "x", nil))
				return
			}
			pass.ServeHTTP(w, r)
		})
		f.makeClass(nil)
		claim := f.claim(func(c *corev1.PersistentVolumeClaim) { // as an earlier process has left it
			c.Finalizers = []string{kube.ProvisioningFinalizer}
		})
		f.event("ProvisioningFailed", "removing finalizer "+kube.ProvisioningFinalizer, "forbidden")
		granted.Store(true)
		f.saved(claim)
		f.claimIs("is not protected", func(c *corev1.PersistentVolumeClaim) bool { return !isProtected(c) })
	})
	invalid := apierrors.NewInvalid(schema.GroupKind{Kind: "PersistentVolume"}, "x", nil)
	for name, tt := range map[string]struct {
		answer *apierrors.StatusError
		advice string
	}{
		"invalid":   {invalid, "Correct the policy that denies it, or the driver, and restart the provisioner"},
		"forbidden": {apierrors.NewForbidden(schema.GroupResource{Resource: "x"}, "x", nil), "Grant create on persistentvolumes"},
	} {
		t.Run("099_PersistentVolume_of_a_deleted_claim_"+name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			var granted atomic.Bool
			f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if r.Method == http.MethodPost && r.URL.Path == "/api/v1/persistentvolumes" && !granted.Load() {
					refuse(w, tt.answer)
					return
				}
				pass.ServeHTTP(w, r)
			})
			f.makeClass(nil)
			claim := f.claim(nil)
			f.claimIs("is protected", isProtected)
			f.deleteClaim()
			made := f.Plugin.Volumes()[0].ID
			advice := []string{"ProvisioningFailed", tt.advice, `volume "` + made + `"`, "remove finalizer " + kube.ProvisioningFinalizer}
			f.event(advice...)
			calls := len(f.Plugin.Calls(create)) // a user may delete the volume and remove the finalizer: no call creates another one
			f.event(advice...)
			f.event(advice...)
			f.Calls(create, calls)
			granted.Store(true)
			pv := f.saved(claim)
			f.claimIs("is deleted", released)
			f.phase(pv, corev1.VolumeReleased)
			f.gone(pv)
			if n := f.Plugin.VolumeCount(); n != 0 {
				t.Errorf("%d volumes are left", n)
			}
		})
	}
	t.Run("099_volume_that_cannot_be_saved_is_recorded", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		var refused atomic.Bool
		refused.Store(true)
		f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodPost && r.URL.Path == "/api/v1/persistentvolumes" && refused.Load() {
				http.Error(w, "no", http.StatusInternalServerError)
				return
			}
			pass.ServeHTTP(w, r)
		})
		f.makeClass(nil)
		claim := f.claim(nil)
		f.claimIs("is protected", isProtected)
		_ = f.Stop(workloop.ErrDrain)
		f.vanish()
		refused.Store(false)
		f.start()
		f.saved(claim)
		f.claimIs("is deleted", isGone)
		if n := f.Plugin.VolumeCount(); n != 1 {
			t.Errorf("%d volumes", n)
		}
	})
	t.Run("099_deleted_before_the_claim_is_bound", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(nil)
		claim := f.claim(nil)
		pv := f.saved(claim)
		f.Crash()
		f.start()
		f.settles() // the claim has a PersistentVolume
		f.patchVolume(pv, `{"metadata":{"finalizers":null}}`)
		f.Must(f.Client.CoreV1().PersistentVolumes().Delete(t.Context(), pv.Name, metav1.DeleteOptions{}))
		kubetest.Eventually(t, "the claim has another PersistentVolume", func(ctx context.Context) error {
			now, err := f.Client.CoreV1().PersistentVolumes().Get(ctx, pv.Name, metav1.GetOptions{})
			if err == nil && now.UID == pv.UID {
				err = errors.New("it has not")
			}
			return err
		})
	})
	t.Run("100_name_of_another_claim", func(t *testing.T) {
		t.Run("before_the_call", func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			claim := f.claim(nil)
			f.volume("pvc-"+string(claim.UID), corev1.VolumeBound, nil)
			f.makeClass(nil)
			f.event("ProvisioningFailed", "already exists: spec.claimRef names another PVC")
			events := f.event("ProvisioningFailed", "already exists: spec.claimRef names another PVC") // again
			f.Calls(create, 0)
			if n := count(events, "Succeeded"); n > 0 {
				t.Errorf("events %q", events)
			}
		})
		for name, tt := range map[string]struct {
			same  bool // the driver has one volume for both
			event string
		}{
			"at_the_last_moment":    {false, "already exists with another volumeHandle"},
			"and_of_its_volume_too": {true, "is not for this PVC"},
		} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, csitest.Config{}, nil)
				gate := make(chan struct{})
				f.Plugin.Next(create, func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
					response, err := do()
					return heldUntil(gate, csitest.Default())(ctx, p, request, func() (any, error) { return response, err })
				})
				f.makeClass(nil)
				claim := f.claim(nil)
				kubetest.Eventually(t, "the volume is made", func(context.Context) error {
					if n := f.Plugin.VolumeCount(); n != 1 {
						return fmt.Errorf("%d volumes", n)
					}
					return nil
				})
				made := f.Plugin.Volumes()[0].ID
				f.volume("pvc-"+string(claim.UID), corev1.VolumeBound, func(pv *corev1.PersistentVolume) {
					if tt.same {
						pv.Spec.CSI.VolumeHandle = made
					}
				})
				close(gate)
				events := f.event("ProvisioningFailed", tt.event)
				events = append(
					events, f.event("ProvisioningFailed", "increase --volume-name-uuid-length")...,
				) // the next attempt finds it before the call
				if n := count(events, "Succeeded"); n > 0 {
					t.Errorf("events %q", events)
				}
				f.Calls(create, 1)
				left := slices.ContainsFunc(f.Plugin.Volumes(), func(v csitest.Volume) bool { return v.ID == made })
				if left != tt.same {
					t.Errorf("the volume is left: %v", left)
				}
			})
		}
	})
}

// saving is what happens while the PersistentVolume of a volume cannot be created.
type saving struct {
	lost      bool // it was created, and the answer did not come through
	gone      bool // its claim is deleted
	retain    bool // by its class; it is released
	deleted   bool // its finalizer keeps it, unless
	finalized bool // its volume may be deleted with it
	migrated  bool // of the in-tree plugin of vSphere, whose PersistentVolumes do not have the ID
}

func savedLater(t *testing.T, s saving) {
	plugin, owner := csitest.Config{}, ""
	if s.migrated {
		plugin = csitest.Config{Name: "csi.vsphere.vmware.com", VolumeContext: map[string]string{"initialvolumefilepath": "[ds] a.vmdk"}}
		owner = "kubernetes.io/vsphere-volume"
	}
	f := scenario(t, plugin, func(c *Config) {
		if s.gone {
			c.ProvisioningProtection = ProtectionOff // else the claim stays until the PersistentVolume is created
		}
	})
	var posts atomic.Int32
	gate := make(chan struct{})
	f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method == http.MethodPost && r.URL.Path == "/api/v1/persistentvolumes" {
			n := posts.Add(1)
			if n == 1 && s.lost {
				pass.ServeHTTP(httptest.NewRecorder(), r)
			}
			if n == 3 {
				select {
				case <-gate:
				case <-r.Context().Done():
				}
			}
			if n <= 3 {
				http.Error(w, "out of order", http.StatusInternalServerError)
				return
			}
		}
		pass.ServeHTTP(w, r)
	})
	f.makeClass(func(c *storagev1.StorageClass) {
		if s.retain {
			c.ReclaimPolicy = ptr.To(corev1.PersistentVolumeReclaimRetain)
		}
		c.Provisioner = cmp.Or(owner, f.Driver)
	})
	claim := f.claim(func(c *corev1.PersistentVolumeClaim) {
		if s.migrated {
			c.Annotations = map[string]string{storagehelpers.AnnStorageProvisioner: owner, storagehelpers.AnnMigratedTo: f.Driver}
		}
	})
	kubetest.Eventually(t, "the third attempt is made", func(context.Context) error {
		if n := posts.Load(); n < 3 {
			return fmt.Errorf("%d attempts", n)
		}
		return nil
	})
	if s.gone {
		f.vanish()
		f.claimIs("is deleted", isGone)
	}
	if s.retain {
		f.phase(f.saved(claim), corev1.VolumeReleased)
	}
	creations := 1
	if s.finalized {
		f.patchVolume(f.saved(claim), `{"metadata":{"finalizers":null}}`)
		creations = 2 // by the same name: the driver has the volume still
	}
	if s.deleted {
		f.Must(f.Client.CoreV1().PersistentVolumes().Delete(t.Context(), f.saved(claim).Name, metav1.DeleteOptions{}))
	}
	if s.finalized {
		kubetest.Eventually(t, "the watch has shown the deletion", func(context.Context) error {
			if !f.c.claimLoop.Load().ops.Get(keyOf(claim)).Payload.pvDeleted {
				return errors.New("it has not")
			}
			return nil
		})
	}
	close(gate)
	if s.gone && s.finalized { // nothing needs another volume
		f.forgotten(claim)
		f.Calls(create, 1)
		return
	}
	if events := f.event("ProvisioningSucceeded"); count(events, "Failed") > 0 {
		t.Errorf("events %q", events)
	}
	if pv := f.saved(claim); pv.Spec.ClaimRef.UID != claim.UID {
		t.Errorf("claim %v", pv.Spec.ClaimRef)
	}
	f.settles()
	if n := count(f.otherEvents(), "ProvisioningSucceeded"); n > 0 {
		t.Errorf("%d further successes", n)
	}
	if n := posts.Load(); n != 4 {
		t.Errorf("%d attempts, want 4", n)
	}
	f.Calls(create, creations)
	f.Calls(remove, 0)
	if n := f.Plugin.VolumeCount(); n != 1 {
		t.Errorf("%d volumes", n)
	}
}

func provisionerScenarioVolumes(t *testing.T) {
	t.Run("102_everything_in_its_place", func(t *testing.T) {
		f := scenario(t, csitest.Config{VolumeContext: map[string]string{"pool": "p1"}}, nil)
		f.makeClass(func(c *storagev1.StorageClass) {
			c.Parameters = map[string]string{"type": "fast", volumerules.ParameterPrefix + "fstype": "xfs"}
			c.MountOptions = []string{"noatime"}
		})
		claim := f.claim(nil)
		pv := f.saved(claim)
		identity := pv.Spec.CSI.VolumeAttributes[identityAttribute]
		if !regexp.MustCompile(`^\d+-\d+-` + regexp.QuoteMeta(f.Driver) + `$`).MatchString(identity) {
			t.Errorf("identity %q", identity)
		}
		if want := map[string]string{storagehelpers.AnnDynamicallyProvisioned: f.Driver, volumerules.AnnDeletionSecretName: "",
			volumerules.AnnDeletionSecretNamespace: ""}; fmt.Sprint(pv.Annotations) != fmt.Sprint(want) {
			t.Errorf("annotations %v, want %v", pv.Annotations, want)
		}
		if !slices.Equal(pv.Finalizers, []string{storagehelpers.PVDeletionProtectionFinalizer, "kubernetes.io/pv-protection"}) ||
			len(pv.Labels) > 0 {
			t.Errorf("finalizers %v, labels %v", pv.Finalizers, pv.Labels)
		}
		want := corev1.PersistentVolumeSpec{
			AccessModes: claim.Spec.AccessModes, Capacity: claim.Spec.Resources.Requests, MountOptions: []string{"noatime"},
			StorageClassName:              f.class,
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete, VolumeMode: ptr.To(corev1.PersistentVolumeFilesystem),
			ClaimRef: &corev1.ObjectReference{
				Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: f.Namespace, Name: "data", UID: claim.UID,
				ResourceVersion: claim.ResourceVersion,
			},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: f.Driver, VolumeHandle: f.Plugin.Volumes()[0].ID, FSType: "xfs",
				VolumeAttributes: map[string]string{identityAttribute: identity, "pool": "p1"},
			}},
		}
		if !apiequality.Semantic.DeepEqual(pv.Spec, want) {
			t.Errorf("got  %+v\nwant %+v", pv.Spec, want)
		}
	})
	t.Run("103_retained", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorker)
		f.makeClass(func(c *storagev1.StorageClass) { c.ReclaimPolicy = ptr.To(corev1.PersistentVolumeReclaimRetain) })
		pv := f.saved(f.claim(nil))
		f.phase(pv, corev1.VolumeBound)
		f.volumesSettle()
		pv, err := f.Client.CoreV1().PersistentVolumes().Get(t.Context(), pv.Name, metav1.GetOptions{})
		f.Must(err)
		if pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain ||
			slices.Contains(pv.Finalizers, storagehelpers.PVDeletionProtectionFinalizer) {
			t.Errorf("policy %s, finalizers %v", pv.Spec.PersistentVolumeReclaimPolicy, pv.Finalizers)
		}
	})
	t.Run("104_read_only", func(t *testing.T) {
		for _, flag := range []bool{true, false} {
			t.Run(fmt.Sprint(flag), func(t *testing.T) {
				f := scenario(t, csitest.Config{}, func(c *Config) { c.ControllerPublishReadonly = flag })
				f.makeClass(nil)
				for name, tt := range map[string]struct {
					modes []corev1.PersistentVolumeAccessMode
					want  bool
				}{
					"rox":     {[]corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}, flag},
					"rox-rwx": {[]corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany, corev1.ReadWriteMany}, false},
					"rwx":     {[]corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}, false},
				} {
					pv := f.saved(f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name, c.Spec.AccessModes = name, tt.modes }))
					if pv.Spec.CSI.ReadOnly != tt.want {
						t.Errorf("%s: read-only is %v", name, pv.Spec.CSI.ReadOnly)
					}
				}
			})
		}
	})
	t.Run("105_migrated", func(t *testing.T) {
		const inTree = "kubernetes.io/aws-ebs"
		const attacher = "external-attacher/ebs-csi-aws-com"
		f := newFixture(t, csitest.Config{Name: "ebs.csi.aws.com"}, patient)
		f.change = func(d *Deps) { d.VolumeFinalizers = func() []string { return []string{attacher} } }
		f.start()
		claim := f.claim(func(c *corev1.PersistentVolumeClaim) {
			c.Annotations = map[string]string{storagehelpers.AnnStorageProvisioner: inTree, storagehelpers.AnnMigratedTo: f.Driver}
		})
		f.settles()
		f.makeClass(func(c *storagev1.StorageClass) { // wakes the claim
			c.Provisioner, c.Parameters = inTree, map[string]string{"type": "gp2", "fsType": "ext4"}
		})
		pv := f.saved(claim)
		request := f.Plugin.Calls(create)[0].Request.(*csi.CreateVolumeRequest)
		if fmt.Sprint(request.GetParameters()) != "map[type:gp2]" || request.GetVolumeCapabilities()[0].GetMount().GetFsType() != "ext4" {
			t.Errorf("request %v", request)
		}
		ebs := pv.Spec.AWSElasticBlockStore
		if ebs == nil || pv.Spec.CSI != nil || ebs.VolumeID != f.Plugin.Volumes()[0].ID || ebs.FSType != "ext4" {
			t.Fatalf("source %+v", pv.Spec.PersistentVolumeSource)
		}
		if slices.Contains(pv.Finalizers, attacher) {
			t.Errorf("finalizers %q: attachers remove theirs from in-tree volumes without %s", pv.Finalizers, storagehelpers.AnnMigratedTo)
		}
		if by := pv.Annotations[storagehelpers.AnnDynamicallyProvisioned]; by != inTree {
			t.Errorf("provisioned by %q", by)
		}
		f.Must(f.Client.StorageV1().StorageClasses().Delete(t.Context(), f.class, metav1.DeleteOptions{}))
		f.makeClass(func(c *storagev1.StorageClass) { // which cannot be translated, and does not count any more
			c.Provisioner, c.Parameters = inTree, map[string]string{"zone": "us-east-1a"}
			c.AllowedTopologies = allow(in(corev1.LabelTopologyZone, "us-east-1a"))
		})
		kubetest.Eventually(t, "the new class is in the cache", func(context.Context) error {
			if c, ok := f.c.classes.Get(f.class); !ok || c.AllowedTopologies == nil {
				return errors.New("it is not")
			}
			return nil
		})
		f.patchVolume(pv, fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, storagehelpers.AnnMigratedTo, f.Driver))
		f.held(ebs.VolumeID, false)
		f.phase(pv, corev1.VolumeReleased)
		f.gone(pv)
		if r := f.Plugin.Calls(remove)[0].Request.(*csi.DeleteVolumeRequest); r.GetVolumeId() != ebs.VolumeID {
			t.Errorf("deleted %v", r)
		}
		for _, method := range []string{create, remove} {
			if n := f.metric("csi_sidecar_operations_seconds", "method_name", "/csi.v1.Controller/"+method, "migrated", "true"); n != 1 {
				t.Errorf("%v calls of %s are counted as migrated", n, method)
			}
		}
	})
}

func provisionerScenarioDeletion(t *testing.T) {
	t.Run("saved_volume_that_somebody_removed_is_made_anew", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(func(c *storagev1.StorageClass) { c.ReclaimPolicy = ptr.To(corev1.PersistentVolumeReclaimRetain) })
		claim := f.claim(nil)
		pv := f.saved(claim)
		f.Must(f.Client.CoreV1().PersistentVolumes().Delete(t.Context(), pv.Name, metav1.DeleteOptions{}))
		f.gone(pv)
		if again := f.saved(claim); again.UID == pv.UID || again.Spec.CSI.VolumeHandle != pv.Spec.CSI.VolumeHandle {
			t.Errorf("volume %q of %q", again.Spec.CSI.VolumeHandle, again.UID)
		}
	})
	t.Run("107_110_114_115_to_be_deleted_or_not", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorker)
		f.makeClass(nil)
		retained := f.volume(f.Namespace+"-retained", corev1.VolumeReleased, func(pv *corev1.PersistentVolume) {
			pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
		})
		kept := []*corev1.PersistentVolume{
			retained,
			f.volume(f.Namespace+"-bound", corev1.VolumeBound, nil), f.volume(f.Namespace+"-available", corev1.VolumeAvailable, nil),
			f.volume(f.Namespace+"-failed", corev1.VolumeFailed, nil),
			f.volume(f.Namespace+"-other", corev1.VolumeReleased, func(pv *corev1.PersistentVolume) {
				pv.Annotations = map[string]string{storagehelpers.AnnDynamicallyProvisioned: "other.example.com"}
			}),
			f.volume(
				f.Namespace+"-other-driver", corev1.VolumeReleased,
				func(pv *corev1.PersistentVolume) { pv.Spec.CSI.Driver = "other.example.com" },
			),
		}
		terminating := f.volume(
			f.Namespace+"-terminating", corev1.VolumeAvailable,
			func(pv *corev1.PersistentVolume) { pv.Finalizers = []string{"example.com/keep"} },
		)
		f.Must(f.Client.CoreV1().PersistentVolumes().Delete(t.Context(), terminating.Name, metav1.DeleteOptions{}))
		f.phase(terminating, corev1.VolumeReleased)
		f.gone(f.volume(f.Namespace+"-static", corev1.VolumeReleased, nil))
		f.volumesSettle()
		for _, pv := range append(kept, terminating) {
			if calls := f.deletions(pv); len(calls) > 0 {
				t.Errorf("the volume of %s was deleted", pv.Name)
			}
		}
		f.patchVolume(retained, `{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}`)
		f.gone(retained)
		if n := len(f.deletions(retained)); n != 1 {
			t.Errorf("%d calls for the volume that is not retained any more", n)
		}
		f.patchVolume(terminating, `{"metadata":{"finalizers":null}}`)
	})
	t.Run("110_retained_in_a_stale_cache", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorker)
		stale := f.volume(f.Namespace+"-stale", corev1.VolumeBound, func(pv *corev1.PersistentVolume) {
			pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
			pv.Finalizers = []string{storagehelpers.PVDeletionProtectionFinalizer}
			pv.Spec.CSI.Driver = "other.example.com" // the running provisioner ignores it
		})
		patch, err := (driver{name: f.Driver}).decideVolume(pvState{pv: stale}).change.JSONPatch(stale)
		f.Must(err)
		f.patchVolume(stale, `{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}`)
		_, err = f.Client.CoreV1().PersistentVolumes().Patch(t.Context(), stale.Name, types.JSONPatchType, patch, metav1.PatchOptions{})
		if !kube.IsPatchTestFailed(err) {
			t.Errorf("removing the finalizer of a volume that is not retained any more: %v", err)
		}
		f.patchVolume(stale, `{"metadata":{"finalizers":null}}`)
	})
	t.Run("110_retained_while_the_secret_is_read", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorker)
		f.makeSecret("login", map[string]string{"user": "a"})
		pv := f.volume(f.Namespace+"-login", corev1.VolumeBound, func(pv *corev1.PersistentVolume) {
			pv.Annotations = map[string]string{
				volumerules.AnnDeletionSecretName: "login", volumerules.AnnDeletionSecretNamespace: f.Namespace,
			}
		})
		read := make(chan struct{})
		f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/secrets/login") {
				f.patchVolume(pv, `{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`)
				close(read)
			}
			pass.ServeHTTP(w, r)
		})
		f.phase(pv, corev1.VolumeReleased)
		<-read
		f.volumesSettle()
		if n := len(f.deletions(pv)); n != 0 {
			t.Errorf("%d calls", n)
		}
	})
	t.Run("111_attached", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, oneWorker)
		f.makeClass(nil)
		attachments := f.Client.StorageV1().VolumeAttachments()
		volumes := map[string]*corev1.PersistentVolume{}
		for _, state := range []string{"attached", "attaching", "detaching"} {
			volumes[state] = f.attachedVolume(state)
		}
		for _, pv := range volumes {
			f.phase(pv, corev1.VolumeReleased)
		}
		f.volumesSettle()
		for state, pv := range volumes {
			if n := len(f.deletions(pv)); n != 0 {
				t.Errorf("%s: %d calls of DeleteVolume", state, n)
			}
		}
		if events := f.otherEvents(); len(events) > 0 { // detaching is expected to take a moment
			t.Errorf("events %q", events)
		}
		for state, pv := range volumes {
			began := time.Now()
			if state == "detaching" {
				_, err := attachments.Patch(
					t.Context(), pv.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{},
				)
				f.Must(err)
			} else {
				f.Must(attachments.Delete(t.Context(), pv.Name, metav1.DeleteOptions{}))
			}
			f.gone(pv)
			calls := f.deletions(pv)
			if len(calls) != 1 || calls[0].Began.Sub(began) > blockedWarning/2 { // by the event, not by the next look
				t.Errorf("%s: %d calls, began %v", state, len(calls), began)
			}
		}
	})
	t.Run("111_attached_after_a_failure", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(nil)
		pv := f.volume(f.Namespace+"-used", corev1.VolumeAvailable, nil)
		gate := make(chan struct{})
		f.Plugin.Next(remove, heldUntil(gate, csitest.Fail(codes.FailedPrecondition, "in use")))
		f.phase(pv, corev1.VolumeReleased)
		f.Wait(remove, 1)
		f.attach(pv, "attached")
		close(gate)
		kubetest.Eventually(t, "/statusz shows the failure during the attachment", func(context.Context) error {
			failing := f.failing("volumes")
			if len(failing) != 1 || !strings.Contains(failing[0].Error, "in use") || time.Until(failing[0].Next) < blockedWarning/2 {
				return fmt.Errorf("it shows %+v", failing)
			}
			return nil
		})
		f.Calls(remove, 1)
	})
	t.Run("111_attached_with_a_driver_that_does_not_attach", func(t *testing.T) {
		f := scenario(
			t,
			csitest.Config{
				Controller: []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME},
			},
			nil,
		)
		f.makeClass(nil)
		pv := f.attachedVolume("attached")
		f.phase(pv, corev1.VolumeReleased)
		f.gone(pv)
		if n := len(f.deletions(pv)); n != 1 {
			t.Errorf("%d calls", n)
		}
	})
	t.Run("112_doubling_delays", func(t *testing.T) {
		const start = 100 * time.Millisecond
		f := scenario(t, csitest.Config{}, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = start, time.Hour })
		gate, broken := make(chan struct{}), csitest.Fail(codes.Internal, "broken")
		f.Plugin.Next(remove, broken, broken, broken, heldUntil(gate, csitest.Default()))
		f.makeClass(nil)
		pv := f.saved(f.claim(nil))
		f.event("ProvisioningSucceeded")
		f.held(pv.Spec.CSI.VolumeHandle, false)
		f.phase(pv, corev1.VolumeReleased)
		f.Wait(remove, 4)
		if events := f.otherEvents(); count(events, "VolumeFailedDelete rpc error: code = Internal desc = broken") != 3 ||
			len(events) != 3 {
			t.Errorf("events %q", events)
		}
		live, err := f.Client.CoreV1().PersistentVolumes().Get(t.Context(), pv.Name, metav1.GetOptions{})
		f.Must(err)
		if live.DeletionTimestamp != nil || !slices.Contains(live.Finalizers, storagehelpers.PVDeletionProtectionFinalizer) {
			t.Errorf("deleted %v, finalizers %v", live.DeletionTimestamp, live.Finalizers)
		}
		close(gate)
		f.gone(pv)
		f.distances(f.Plugin.Calls(remove), start, 2*start, 4*start)
	})
	pvs := schema.GroupResource{Resource: "persistentvolumes"}
	webhook := &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusBadRequest, Message: "no"}}
	for name, tt := range map[string]struct {
		methods string
		answer  *apierrors.StatusError
		phase   corev1.PersistentVolumePhase
		silent  bool
	}{
		"finalizer_kept_without_permission": {"PATCH PUT", apierrors.NewForbidden(pvs, "x", nil), corev1.VolumeReleased, false},
		"finalizer_kept_by_a_policy": {
			"PATCH", apierrors.NewInvalid(schema.GroupKind{Kind: "PersistentVolume"}, "x", nil), corev1.VolumeReleased, false,
		},
		"finalizer_kept_by_a_webhook":    {"PATCH", webhook, corev1.VolumeReleased, false},
		"object_kept_without_permission": {"DELETE", apierrors.NewForbidden(pvs, "x", nil), corev1.VolumeReleased, false},
		"object_kept_by_a_conflict":      {"DELETE", apierrors.NewConflict(pvs, "x", nil), corev1.VolumeReleased, true},
		"finalizer_not_added":            {"PATCH PUT", apierrors.NewForbidden(pvs, "x", nil), corev1.VolumeBound, true},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			var refused atomic.Int32
			var granted atomic.Bool
			f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				one := strings.HasPrefix(r.URL.Path, "/api/v1/persistentvolumes/")
				if one && strings.Contains(tt.methods, r.Method) && !granted.Load() {
					refused.Add(1)
					refuse(w, tt.answer)
					return
				}
				pass.ServeHTTP(w, r)
			})
			pv := f.volume(f.Namespace+"-pv", tt.phase, func(pv *corev1.PersistentVolume) {
				if tt.phase == corev1.VolumeReleased {
					pv.Finalizers = []string{storagehelpers.PVDeletionProtectionFinalizer}
				}
			})
			kubetest.Eventually(t, "the write is refused again", func(context.Context) error {
				if n := refused.Load(); n < 5 {
					return fmt.Errorf("%d times so far", n)
				}
				return nil
			})
			reported := count(f.otherEvents(), "Grant patch and delete on persistentvolumes") > 0
			failures := f.metric("controller_persistentvolume_delete_failed_total")
			if reported == tt.silent || tt.silent != (failures == 0) {
				t.Errorf("reported: %t, %v failures", reported, failures)
			}
			granted.Store(true)
			f.phase(pv, corev1.VolumeReleased)
			f.gone(pv)
			if n := len(f.deletions(pv)); n != 1 {
				t.Errorf("%d calls", n)
			}
		})
	}
	t.Run("failure_without_secret", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.Plugin.Next(remove, csitest.Fail(codes.Unauthenticated, "no key"))
		pv := f.volume(f.Namespace+"-pv", corev1.VolumeReleased, func(pv *corev1.PersistentVolume) {
			pv.Annotations = map[string]string{volumerules.AnnDeletionSecretName: "deleted",
				volumerules.AnnDeletionSecretNamespace: f.Namespace}
		})
		f.event(
			"Warning VolumeFailedDelete rpc error: code = Unauthenticated desc = no key; DeleteVolume without secret",
			"deleted",
		)
		f.gone(pv)
		if events := f.otherEvents(); len(events) != 1 || count(events, "Normal DeletionWithoutSecret") != 1 {
			t.Errorf("events %q", events)
		}
	})
	// A driver may report success without the credentials that it needs to delete the volume.
	for failure, respond := range map[string]func(http.ResponseWriter){
		"no key":         func(w http.ResponseWriter) { http.Error(w, "no key", http.StatusInternalServerError) },
		"unexpected EOF": func(w http.ResponseWriter) { w.Header().Set("Content-Length", "9"); w.WriteHeader(http.StatusOK) },
	} {
		t.Run("113_secret_cannot_be_read_"+failure, func(t *testing.T) {
			f := scenario(t, csitest.Config{}, nil)
			var failed atomic.Bool
			f.through(f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				if strings.Contains(r.URL.Path, "/secrets/") && !failed.Swap(true) {
					respond(w)
					return
				}
				pass.ServeHTTP(w, r)
			})
			f.secret("data", "v")
			pv := f.volume(f.Namespace+"-pv", corev1.VolumeReleased, func(pv *corev1.PersistentVolume) {
				pv.Annotations = map[string]string{volumerules.AnnDeletionSecretName: "data",
					volumerules.AnnDeletionSecretNamespace: f.Namespace}
			})
			f.event("Warning VolumeFailedDelete", "data", failure)
			f.gone(pv)
			if calls := f.deletions(pv); len(calls) != 1 || calls[0].Request.(*csi.DeleteVolumeRequest).GetSecrets()["k"] != "v" {
				t.Errorf("calls %v", calls)
			}
		})
	}
	t.Run("113_secrets", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		template := func(name string) func(*storagev1.StorageClass) {
			return func(c *storagev1.StorageClass) {
				c.Parameters = map[string]string{
					volumerules.ParameterPrefix + "provisioner-secret-name": name, volumerules.ParameterPrefix +
						"provisioner-secret-namespace": "${pvc.namespace}",
				}
			}
		}
		f.makeClass(template("${pvc.name}"))
		templated := f.Namespace + "-templated"
		f.makeClass(func(c *storagev1.StorageClass) { template("${pvc.annotations['x']}")(c); c.Name = templated })
		f.secret("data", "of the class")
		f.secret("annotated", "of the annotations")
		named := func(name, namespace string) map[string]string {
			return map[string]string{volumerules.AnnDeletionSecretName: name, volumerules.AnnDeletionSecretNamespace: namespace}
		}
		for name, tt := range map[string]struct {
			annotations map[string]string
			class       string
			noClaim     bool
			want        string // the value of the secret; "": the call has none
			event       string
		}{
			"annotated":      {annotations: named("annotated", f.Namespace), want: "of the annotations"},
			"missing":        {annotations: named("missing", f.Namespace), event: "missing"},
			"empty":          {annotations: named("", "")},
			"half-empty":     {annotations: named("annotated", ""), event: "one of them is empty"},
			"class":          {want: "of the class"},
			"one-annotation": {annotations: map[string]string{volumerules.AnnDeletionSecretName: "annotated"}, want: "of the class"},
			"class-gone":     {class: f.Namespace + "-none"},
			"no-claim":       {noClaim: true},
			"class-by-annotation": {
				annotations: map[string]string{corev1.BetaStorageClassAnnotation: f.class}, class: f.Namespace + "-none",
				want: "of the class",
			},
			"template": {class: templated, event: "pvc.annotations['x']"},
		} {
			pv := f.volume(f.Namespace+"-"+name, corev1.VolumeReleased, func(pv *corev1.PersistentVolume) {
				pv.Annotations = tt.annotations
				if tt.class != "" {
					pv.Spec.StorageClassName = tt.class
				}
				if tt.noClaim {
					pv.Spec.ClaimRef = nil
				}
			})
			f.gone(pv)
			calls := f.deletions(pv)
			if len(calls) != 1 {
				t.Fatalf("%s: %d calls", name, len(calls))
			}
			if s := calls[0].Request.(*csi.DeleteVolumeRequest).GetSecrets(); s["k"] != tt.want || tt.want == "" && len(s) > 0 {
				t.Errorf("%s: secrets %v, want %q", name, s, tt.want)
			}
			events := f.otherEvents()
			sent := count(events, tt.event)
			if tt.event == "" && len(events) > 0 || tt.event != "" &&
				(sent != 1 || len(events) != 1 || count(events, "Normal DeletionWithoutSecret") != 1) {
				t.Errorf("%s: events %q", name, events)
			}
		}
	})
}

// attachedVolume makes a volume and an attachment of its name in some state.
func (f *fixture) attachedVolume(state string) *corev1.PersistentVolume {
	f.Helper()
	pv := f.volume(f.Namespace+"-"+state, corev1.VolumeAvailable, nil)
	f.attach(pv, state)
	return pv
}

// failing returns what /statusz shows of a loop.
func (f *fixture) failing(loop string) []workloop.Failing {
	for _, s := range f.c.deps.Queues.Status() {
		if s.Name == loop {
			return s.Failing
		}
	}
	return nil
}

// attach creates a VolumeAttachment of pv that is attached, attaching or detaching, and waits until the provisioner has seen it.
func (f *fixture) attach(pv *corev1.PersistentVolume, state string) {
	f.Helper()
	attachments := f.Client.StorageV1().VolumeAttachments()
	va := &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: pv.Name}, Spec: storagev1.VolumeAttachmentSpec{
		Attacher: f.Driver, NodeName: "n", Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &pv.Name}}}
	if state == "detaching" {
		va.Finalizers = []string{"example.com/keep"}
	}
	va, err := attachments.Create(f.Context(), va, metav1.CreateOptions{})
	f.Must(err)
	switch state {
	case "attached":
		va.Status.Attached = true
		_, err = attachments.UpdateStatus(f.Context(), va, metav1.UpdateOptions{})
	case "detaching":
		err = attachments.Delete(f.Context(), va.Name, metav1.DeleteOptions{})
	}
	f.Must(err)
	if f.c.driver.caps.PublishUnpublishVolume {
		kubetest.Eventually(f.T, "the attachment is in the cache", func(context.Context) error {
			if len(kube.AttachmentsOf(f.c.attachments, pv.Name)) != 1 {
				return errors.New("it is not")
			}
			return nil
		})
	}
}

func (f *fixture) secret(name, value string) {
	f.Helper()
	_, err := f.Client.CoreV1().Secrets(f.Namespace).Create(
		f.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, StringData: map[string]string{"k": value}},
		metav1.CreateOptions{},
	)
	f.Must(err)
}

// userWith returns the configuration of a user with the permissions of rule only.
func (f *fixture) userWith(rule rbacv1.PolicyRule) *rest.Config {
	f.Helper()
	kubetest.NeedReal(f)
	name := f.Namespace + "-user"
	rbac := f.Client.RbacV1()
	_, err := rbac.ClusterRoles().Create(
		f.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{rule}},
		metav1.CreateOptions{},
	)
	f.Must(err)
	_, err = rbac.ClusterRoleBindings().Create(f.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}},
	}, metav1.CreateOptions{})
	f.Must(err)
	kubetest.Eventually(f.T, "the permissions are in force", func(ctx context.Context) error {
		review, err := f.Client.AuthorizationV1().SubjectAccessReviews().Create(ctx,
			&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				User: name, ResourceAttributes: &authorizationv1.ResourceAttributes{
					Namespace: f.Namespace, Verb: rule.Verbs[0], Group: rule.APIGroups[0], Resource: rule.Resources[0],
				},
			}}, metav1.CreateOptions{})
		if err == nil && !review.Status.Allowed {
			err = errors.New(review.Status.Reason)
		}
		return err
	})
	return f.ControlPlane.UserConfig(f, name)
}

// metric is the sum of the values, or of the numbers of observations, of the metrics of
// a name that have these labels, given as name, value, name, value and so on.
func (f *fixture) metric(name string, labels ...string) float64 {
	f.Helper()
	families, err := f.Registry.Gather()
	f.Must(err)
	sum := 0.0
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			has := map[string]string{}
			for _, l := range m.GetLabel() {
				has[l.GetName()] = l.GetValue()
			}
			matches := true
			for i := 0; i < len(labels); i += 2 {
				matches = matches && has[labels[i]] == labels[i+1]
			}
			if matches {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}
