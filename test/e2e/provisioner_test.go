// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc/codes"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestProvisionerScenario is the scenarios of the provisioner that are about the
// process. Those about claims and volumes are beside the provisioner.
func TestProvisionerScenario(t *testing.T) {
	t.Parallel()
	provisionerScenarioPermissions(t) // first: one of them takes two minutes, in which the others run
	provisionerScenarioRefused(t)
	provisionerScenarioStart(t)
	provisionerScenarioConnection(t)
	provisionerScenarioReplicas(t)
	provisionerScenarioNumbers(t)
}

// provisionerScenarioRefused: mistakes that are found before anybody is asked anything.
func provisionerScenarioRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		env  []string
		says string
	}{
		"006_two_addresses": {[]string{"--http-endpoint=127.0.0.1:0", "--metrics-address=127.0.0.1:0"}, nil,
			"--http-endpoint and --metrics-address"},
		"007_no_node_name": {[]string{"--node-deployment"}, nil, "NODE_NAME"},
		"008_unknown_gate": {[]string{"--feature-gates=Nope=true"}, nil, `unknown gate "Nope"`},
		"013_uuid_length":  {[]string{"--volume-name-uuid-length=40"}, nil, "--volume-name-uuid-length"},
		"129_renewal_longer_than_lease": {[]string{"--leader-election", "--leader-election-renew-deadline=20s"}, nil,
			"--leader-election-lease-duration"},
		"130_nodes_with_election": {[]string{"--node-deployment", "--leader-election"}, []string{"NODE_NAME=here"},
			"--node-deployment and --leader-election"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, csitest.Config{}, 0)
			cmd := e.command("provision", tt.args...)
			cmd.Env = tt.env
			e.refuses(cmd, tt.says)
		})
	}
}

// provisionerScenarioStart: what happens until the driver is known.
func provisionerScenarioStart(t *testing.T) {
	t.Run("001_not_ready_at_first", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		e.notReadyAtFirst(e.command("provision"))
	})
	t.Run("002_probe_hangs", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		e.plugin.Always("Probe", csitest.Hang())
		p := e.run("provision", "--timeout=500ms")
		e.wait("Probe", 3)
		p.lives()
		e.calls("GetPluginInfo", 0)
		e.plugin.Always("Probe", nil)
		e.wait("GetPluginInfo", 1)
	})
	for name, tt := range map[string]struct {
		method string
		code   codes.Code
	}{
		"003_probe_fails":       {"Probe", codes.Internal},
		"004_identity_fails":    {"GetPluginInfo", codes.Unavailable},
		"005_capabilities_fail": {"ControllerGetCapabilities", codes.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newEnv(t, csitest.Config{}, 0).failsAtFirst("provision", tt.method, tt.code)
		})
	}
	t.Run("004_identity_without_a_name", func(t *testing.T) {
		t.Parallel()
		newEnv(t, csitest.Config{}, 0).needsAName("provision")
	})
	t.Run("008_retired_gate", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		p := e.run("provision", "--feature-gates=HonorPVReclaimPolicy=true")
		e.claim("c", e.class(false, nil))
		e.bound("c")
		if !regexp.MustCompile(`Feature gate has no effect.*HonorPVReclaimPolicy`).MatchString(p.logged()) {
			t.Error("there is no warning")
		}
		e.leftovers("c")
	})
	t.Run("009_kubeconfig_of_the_environment", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		var asked atomic.Int32
		other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			asked.Add(1)
			w.WriteHeader(http.StatusServiceUnavailable)
		}))
		defer other.Close()
		cmd := e.command("provision", "--kubeconfig", kubetest.WriteKubeconfig(t, &rest.Config{Host: other.URL}))
		cmd.Env = []string{"KUBECONFIG=" + e.kubeconfig("provision")}
		e.start(cmd)
		e.claim("c", e.class(false, nil))
		e.bound("c")
		if n := asked.Load(); n > 0 {
			t.Errorf("the server of the flag was asked %d times", n)
		}
		e.leftovers("c")
	})
	t.Run("010_version", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		path, err := binary()
		if err != nil {
			t.Fatal(err)
		}
		stdout, err := exec.Command(path, "provision", "--version", "--csi-address", e.plugin.Address(),
			"--kubeconfig=/does/not/exist").Output()
		if err != nil || !regexp.MustCompile(`^storage-controller \S+\n$`).Match(stdout) {
			t.Errorf("%v: %q", err, stdout)
		}
		if accepted, _ := e.plugin.Connections(); accepted != 0 {
			t.Errorf("%d connections to the driver", accepted)
		}
	})
	t.Run("052_no_attributes_classes", func(t *testing.T) {
		t.Parallel()
		for name, tt := range map[string]struct {
			args    []string
			honours bool
		}{
			"gate_unset": {nil, false},
			"gate_set":   {[]string{"--feature-gates=VolumeAttributesClass=true"}, true},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newEnv(t, csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
					csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
				}}, 0)
				e.attributes("v", map[string]string{"iops": "9"})
				proxy := kubetest.Proxy(t, e.account(), withoutAttributesClasses)
				e.run("provision", append(tt.args, "--kubeconfig", kubetest.WriteKubeconfig(t, proxy))...)
				claim := newClaim("c", e.class(false, nil))
				claim.Spec.VolumeAttributesClassName = ptr.To(e.ns + "-v")
				pv := e.saved(e.create(claim))
				honoured := pv.Spec.VolumeAttributesClassName != nil
				sent := e.plugin.Calls("CreateVolume")[0].Request.(*csi.CreateVolumeRequest).MutableParameters["iops"] == "9"
				if honoured != tt.honours || sent != tt.honours {
					t.Errorf("in the volume: %t, in the request: %t; want both %t", honoured, sent, tt.honours)
				}
			})
		}
	})
}

// attributes makes a VolumeAttributesClass whose name begins with that of the namespace.
func (e *env) attributes(name string, parameters map[string]string) {
	e.t.Helper()
	_, err := e.client.StorageV1().VolumeAttributesClasses().Create(e.t.Context(), &storagev1.VolumeAttributesClass{
		ObjectMeta: metav1.ObjectMeta{Name: e.ns + "-" + name}, DriverName: e.plugin.Name(), Parameters: parameters,
	}, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
}

// withoutAttributesClasses is the hook of a proxy that makes the API server look like an
// older one, which does not list that kind.
func withoutAttributesClasses(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	if r.URL.Path != "/apis/storage.k8s.io/v1" {
		pass.ServeHTTP(w, r)
		return
	}
	r.Header.Set("Accept", "application/json")
	r.Header.Del("Accept-Encoding")
	answer := httptest.NewRecorder()
	pass.ServeHTTP(answer, r)
	var list metav1.APIResourceList
	if err := json.Unmarshal(answer.Body.Bytes(), &list); err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	list.APIResources = slices.DeleteFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Kind == "VolumeAttributesClass" })
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(list)
}

// create is claim for one that is not like the others.
func (e *env) create(claim *corev1.PersistentVolumeClaim) *corev1.PersistentVolumeClaim {
	e.t.Helper()
	claim, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Create(e.t.Context(), claim, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	return claim
}

// saved waits for the PersistentVolume of a claim.
func (e *env) saved(claim *corev1.PersistentVolumeClaim) *corev1.PersistentVolume {
	e.t.Helper()
	var pv *corev1.PersistentVolume
	e.eventually("the volume is saved", func(ctx context.Context) (err error) {
		pv, err = e.client.CoreV1().PersistentVolumes().Get(ctx, "pvc-"+string(claim.UID), metav1.GetOptions{})
		return err
	})
	return pv
}

// provisionerScenarioConnection: the driver goes away.
func provisionerScenarioConnection(t *testing.T) {
	t.Run("011_driver_restarts", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		class := e.class(false, nil)
		e.plugin.Next("CreateVolume", csitest.DoAndHang())
		p := e.run("provision", quick...)
		e.claim("running", class)
		e.wait("CreateVolume", 1)
		e.plugin.Stop()
		p.says("Lost the connection to the driver")
		e.claim("waiting", class)
		if err := e.plugin.Start(e.plugin.Address()); err != nil {
			t.Fatal(err)
		}
		e.bound("running")
		e.bound("waiting")
		e.agrees(2)
		p.lives()
		e.calls("Probe", 2)
		e.calls("GetPluginInfo", 2)
		e.calls("ControllerGetCapabilities", 2)
		e.leftovers("running", "waiting")
	})
	t.Run("011_driver_restarts_exit_wanted", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		p := e.run("provision", "--exit-on-connection-loss")
		p.says("Connected to the driver")
		e.plugin.Stop()
		p.fails("lost the connection to the driver at " + e.plugin.Address())
	})
	t.Run("012_driver_with_another_name", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		p := e.run("provision")
		p.says("Connected to the driver")
		if err := e.plugin.Restart(func(c *csitest.Config) { c.Name = "other.example.com" }); err != nil {
			t.Fatal(err)
		}
		p.fails("other.example.com")
	})
}

// provisionerScenarioReplicas: two processes and one Lease. Each has a driver of its own,
// by which it is seen who calls.
func provisionerScenarioReplicas(t *testing.T) {
	t.Run("122_the_holder_is_killed", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		class, other := e.class(false, nil), csitest.Run(t, csitest.Config{Name: e.plugin.Name(), Numbered: 100})
		first := e.run("provision", election...)
		e.leads(first, e.provisionerLease())
		second := e.run("provision", append([]string{"--csi-address", other.Address()}, election...)...)
		second.says("Connected to the driver")
		for i := range 3 {
			e.claim(fmt.Sprint("c", i), class)
			e.bound(fmt.Sprint("c", i))
		}
		leases, err := e.client.CoordinationV1().Leases(e.ns).List(t.Context(), metav1.ListOptions{})
		if err != nil || len(leases.Items) != 1 {
			t.Errorf("%v: %d Leases", err, len(leases.Items))
		}
		if n := other.Count("CreateVolume"); n > 0 {
			t.Errorf("the replica without the Lease made %d volumes", n)
		}
		first.kill()
		before, err := e.lease(t.Context(), e.provisionerLease())
		if err != nil {
			t.Fatal(err)
		}
		e.claim("later", class)
		e.bound("later")
		after := e.leads(second, e.provisionerLease())
		e.calls("CreateVolume", 3)
		if n := other.Count("CreateVolume"); n != 1 {
			t.Errorf("the replica with the Lease made %d volumes", n)
		}
		took := after.Spec.AcquireTime.Sub(before.Spec.RenewTime.Time)
		if most := leaseDuration + retryPeriod + 30*time.Second; took < leaseDuration || took > most { // the rest is for a busy machine
			t.Errorf("taken over %v after it was renewed, want no less than %v and no more than %v", took, leaseDuration, most)
		}
	})
	t.Run("the_driver_of_the_holder_stops", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		class, other := e.class(false, nil), csitest.Run(t, csitest.Config{Name: e.plugin.Name(), Numbered: 100})
		first := e.run("provision", election...)
		e.leads(first, e.provisionerLease())
		second := e.run("provision", append([]string{"--csi-address", other.Address()}, election...)...)
		second.says("Connected to the driver")
		e.plugin.Stop()
		e.leads(second, e.provisionerLease())
		e.claim("c1", class)
		e.bound("c1")
		other.Stop()
		first.says("Released the Lease, so that a replica whose driver is ready can lead")
		second.says("Released the Lease, so that a replica whose driver is ready can lead")
		if err := e.plugin.Start(e.plugin.Address()); err != nil {
			t.Fatal(err)
		}
		e.leads(first, e.provisionerLease())
		e.claim("c2", class)
		e.bound("c2")
	})
	t.Run("123_the_holder_is_told_to_stop", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		class := e.class(false, nil)
		args := []string{"--leader-election", "--leader-election-retry-period=1s"}
		first := e.run("provision", args...)
		second := e.run("provision", args...)
		if lease := e.somebodyLeads(e.provisionerLease()); *lease.Spec.HolderIdentity == second.pod {
			first, second = second, first
		}
		e.plugin.Next("CreateVolume", csitest.Hang())
		claim := e.claim("c", class)
		e.wait("CreateVolume", 1)
		lease, err := e.lease(t.Context(), e.provisionerLease())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		watch, err := e.client.CoordinationV1().Leases(e.ns).Watch(ctx, metav1.ListOptions{ResourceVersion: lease.ResourceVersion})
		if err != nil {
			t.Fatal(err)
		}
		defer watch.Stop()
		first.signal(syscall.SIGTERM)
		first.says("Shutting down")
		e.plugin.Release()
		if code := first.code(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		if _, err := e.client.CoreV1().PersistentVolumes().Get(t.Context(), "pvc-"+string(claim.UID), metav1.GetOptions{}); err != nil {
			t.Errorf("the volume was not saved: %v", err)
		}
		e.calls("CreateVolume", 1)
		var released, taken *coordinationv1.Lease
		for event := range watch.ResultChan() {
			lease, ok := event.Object.(*coordinationv1.Lease)
			if !ok {
				t.Fatalf("%v", event)
			}
			switch ptr.Deref(lease.Spec.HolderIdentity, "") {
			case "":
				released = lease
			case second.pod:
				taken = lease
			}
			if taken != nil {
				break
			}
		}
		if released == nil || taken == nil {
			t.Fatalf("released: %v, taken: %v", released, taken)
		}
		if took := taken.Spec.AcquireTime.Sub(released.Spec.RenewTime.Time); took >= 14*time.Second { // the Lease is valid for 15s
			t.Errorf("taken over %v after it was released", took)
		}
		e.claim("later", class)
		e.bound("later")
		e.leftovers("c", "later")
	})
	for name, fail := range map[string]func(w http.ResponseWriter, r *http.Request, healed <-chan struct{}){
		"124_api_server_does_not_answer": func(w http.ResponseWriter, r *http.Request, healed <-chan struct{}) {
			select {
			case <-r.Context().Done():
			case <-healed:
			}
			w.WriteHeader(http.StatusServiceUnavailable)
		},
		"124_api_server_answers_with_errors": func(w http.ResponseWriter, _ *http.Request, _ <-chan struct{}) {
			w.WriteHeader(http.StatusServiceUnavailable)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, csitest.Config{}, 0)
			class, other := e.class(false, nil), csitest.Run(t, csitest.Config{Name: e.plugin.Name(), Numbered: 100})
			cut, healed := make(chan struct{}), make(chan struct{})
			proxy := kubetest.Proxy(t, e.account(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
				select {
				case <-cut:
				default:
					pass.ServeHTTP(w, r)
					return
				}
				select {
				case <-healed:
					pass.ServeHTTP(w, r)
				default:
					fail(w, r, healed)
				}
			})
			first := e.run("provision", slices.Concat(election, quick,
				[]string{"--http-endpoint=127.0.0.1:0", "--kubeconfig", kubetest.WriteKubeconfig(t, proxy)})...)
			lease := e.leads(first, e.provisionerLease())
			e.claim("before", class)
			e.bound("before")
			if status, body := first.get("/healthz/leader-election"); status != http.StatusOK {
				t.Errorf("unwell: %d %s", status, body)
			}
			second := e.run("provision", slices.Concat(election, quick, []string{"--csi-address", other.Address()})...)
			second.says("Connected to the driver")
			close(cut)
			e.eventually("the cut-off holder stops working, or says that it is unwell", func(context.Context) error {
				works := first.value("leader_election_master_status", "name="+lease.Name)
				if status, _ := first.get("/healthz/leader-election"); status == http.StatusOK && works != 0 {
					return errors.New("it does not")
				}
				return nil
			})
			e.leads(second, e.provisionerLease())
			e.claim("meanwhile", class) // its watches, which stand, may tell it
			e.bound("meanwhile")
			e.calls("CreateVolume", 1)
			if n := other.Count("CreateVolume"); n != 1 {
				t.Errorf("the other replica made %d volumes", n)
			}
			first.lives()
			close(healed)
			second.kill()
			e.leads(first, e.provisionerLease()) // for it has gone back to waiting
			e.claim("after", class)
			e.bound("after")
			if status, body := first.get("/healthz/leader-election"); status != http.StatusOK {
				t.Errorf("unwell: %d %s", status, body)
			}
		})
	}
}

// provisionerScenarioNumbers: metrics, and what happens at the same time.
func provisionerScenarioNumbers(t *testing.T) {
	t.Run("125_metrics", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		class := e.class(false, nil)
		e.plugin.Next("CreateVolume", csitest.Fail(codes.Internal, "broken"))
		e.plugin.Next("DeleteVolume", csitest.Fail(codes.Internal, "broken"))
		p := e.run("provision", append([]string{"--http-endpoint=127.0.0.1:0", "--leader-election"}, quick...)...)
		e.claim("c", class)
		e.bound("c")
		e.leftovers("c")
		defaults := []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
		want := map[string]family{
			"csi_sidecar_operations_seconds": e.called("Identity/Probe OK", "Identity/GetPluginInfo OK",
				"Identity/GetPluginCapabilities OK", "Controller/ControllerGetCapabilities OK",
				"Controller/CreateVolume OK", "Controller/CreateVolume Internal", "Controller/DeleteVolume OK",
				"Controller/DeleteVolume Internal"),
			"controller_persistentvolumeclaim_provision_total": {[]string{"class=" + class + " source="}, dto.MetricType_COUNTER,
				nil},
			"controller_persistentvolumeclaim_provision_failed_total": {[]string{"class=" + class + " source="}, dto.MetricType_COUNTER,
				nil},
			"controller_persistentvolumeclaim_provision_duration_seconds": {[]string{"class=" + class + " source="},
				dto.MetricType_HISTOGRAM, defaults},
			"controller_persistentvolume_delete_total":            {[]string{"class=" + class}, dto.MetricType_COUNTER, nil},
			"controller_persistentvolume_delete_failed_total":     {[]string{"class=" + class}, dto.MetricType_COUNTER, nil},
			"controller_persistentvolume_delete_duration_seconds": {[]string{"class=" + class}, dto.MetricType_HISTOGRAM, defaults},
		}
		maps.Copy(want, ofEveryRole(e.provisionerLease(), "claims", "clone-protection", "snapshot-protection", "volumes"))
		e.eventually("each operation is counted once", func(context.Context) error { // a deletion is after its last request
			families := p.metrics()
			for _, name := range []string{"controller_persistentvolumeclaim_provision", "controller_persistentvolume_delete"} {
				for _, suffix := range []string{"_total", "_failed_total", "_duration_seconds"} {
					n := 0.0
					for _, m := range families[name+suffix].GetMetric() {
						n += m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
					}
					if n != 1 {
						return fmt.Errorf("%s is %v", name+suffix, n)
					}
				}
			}
			return nil
		})
		p.shows(want)
	})
	t.Run("126_many_at_once", func(t *testing.T) {
		t.Parallel()
		const n, workers = 200, 100
		e := newEnv(t, csitest.Config{Latency: time.Second}, 0)
		class := e.class(false, nil)
		name := func(i int) string { return fmt.Sprint("c", i) }
		e.parallel(n, func(i int) { e.claim(name(i), class) })
		e.run("provision", "--kube-api-qps=0", fmt.Sprint("--worker-threads=", workers))
		for i := range n {
			e.bound(name(i))
		}
		e.parallel(n, func(i int) { e.deleteClaim(name(i)) })
		e.leftovers()
		for _, method := range []string{"CreateVolume", "DeleteVolume"} {
			if most := e.plugin.MaxConcurrent(method); most > workers || most < 2 {
				t.Errorf("%d calls of %s at the same time, with %d workers", most, method, workers)
			}
			e.calls(method, n)
		}
	})
}

func rule(verbs, group string, resources ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: resources, Verbs: strings.Fields(verbs)}
}

// The permissions that csi-provisioner has by its manifests, in the cluster and in its namespace.
var (
	clusterRules = []rbacv1.PolicyRule{
		rule("get list watch create patch delete", "", "persistentvolumes"),
		rule("get list watch update", "", "persistentvolumeclaims"),
		rule("get list watch", "storage.k8s.io", "storageclasses"),
		rule("list watch create update patch", "", "events"),
		rule("get list watch update", "snapshot.storage.k8s.io", "volumesnapshots"),
		rule("get list", "snapshot.storage.k8s.io", "volumesnapshotcontents"),
		rule("get list watch", "storage.k8s.io", "csinodes"),
		rule("get list watch", "", "nodes"),
		rule("get list watch", "storage.k8s.io", "volumeattachments"),
	}
	namespaceRules = []rbacv1.PolicyRule{
		rule("get watch list delete update create", "coordination.k8s.io", "leases"),
		rule("get list watch create update patch delete", "storage.k8s.io", "csistoragecapacities"),
		rule("get", "", "pods"),
		rule("get", "apps", "replicasets"),
	}
)

// user returns the kubeconfig of a user whom rules allow requests, in the cluster and in the
// namespace of the test.
func (e *env) user(cluster, namespace []rbacv1.PolicyRule) string {
	e.t.Helper()
	ctx, rbac := e.t.Context(), e.client.RbacV1()
	meta, subjects := metav1.ObjectMeta{Name: e.ns}, []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: e.ns}}
	_, err := rbac.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: cluster}, metav1.CreateOptions{})
	if err == nil {
		_, err = rbac.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: meta, Subjects: subjects,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: e.ns}}, metav1.CreateOptions{})
	}
	if err == nil {
		_, err = rbac.Roles(e.ns).Create(ctx, &rbacv1.Role{ObjectMeta: meta, Rules: namespace}, metav1.CreateOptions{})
	}
	if err == nil {
		_, err = rbac.RoleBindings(e.ns).Create(ctx, &rbacv1.RoleBinding{ObjectMeta: meta, Subjects: subjects,
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: e.ns}}, metav1.CreateOptions{})
	}
	if err != nil {
		e.t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(e.cp.UserConfig(e.t, e.ns))
	if err != nil {
		e.t.Fatal(err)
	}
	e.eventually("the roles are in force", func(ctx context.Context) error {
		_, err := client.StorageV1().StorageClasses().Get(ctx, "none", metav1.GetOptions{})
		_, err2 := client.CoordinationV1().Leases(e.ns).Get(ctx, "none", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) || !apierrors.IsNotFound(err2) {
			return errors.Join(err, err2)
		}
		return nil
	})
	proxy := kubetest.Proxy(e.t, e.cp.UserConfig(e.t, e.ns),
		func(w http.ResponseWriter, r *http.Request, pass http.Handler) { pass.ServeHTTP(w, r) })
	return kubetest.WriteKubeconfig(e.t, proxy)
}

// provisionerScenarioPermissions: what old manifests grant, and less.
func provisionerScenarioPermissions(t *testing.T) {
	t.Run("128_claims_are_forbidden", func(t *testing.T) {
		e := newEnv(t, csitest.Config{}, 0)
		without := slices.DeleteFunc(slices.Clone(clusterRules),
			func(r rbacv1.PolicyRule) bool { return r.Resources[0] == "persistentvolumeclaims" })
		p := e.run("provision", "--http-endpoint=127.0.0.1:0", "--kubeconfig", e.user(without, namespaceRules))
		e.eventually("it is not ready because of the claims", func(context.Context) error {
			status, body := p.get("/readyz")
			if status != http.StatusServiceUnavailable || !strings.Contains(body, "persistentvolumeclaims") ||
				!strings.Contains(body, "forbidden") {
				return fmt.Errorf("%d: %s", status, body)
			}
			return nil
		})
		p.says(`cannot list resource \"persistentvolumeclaims\"`)
		t.Parallel() // its limit passes while other tests run
		p.codeWithin(4 * time.Minute)
		p.fails("waiting for the first list of persistentvolumeclaims", "gave up after 2m0s")
	})
	t.Run("127_permissions_of_csi_provisioner", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{Segments: []map[string]string{{}}}, 2)
		class, late := e.class(false, nil), e.class(true, nil)
		p := e.run("provision", append([]string{"--leader-election", "--kubeconfig", e.user(clusterRules, namespaceRules)}, quick...)...)
		e.claim("plain", class)
		e.bound("plain")

		e.plugin.Next("CreateVolume", csitest.DoAndFail(codes.DeadlineExceeded, "slow"), csitest.Hang())
		e.claim("retried", class)
		e.wait("CreateVolume", 3)
		if got := e.get("retried"); !slices.Contains(got.Finalizers, "storage-controller.io/provisioning") {
			t.Errorf("finalizers of an indeterminate claim: %v", got.Finalizers)
		}
		e.plugin.Release()
		e.bound("retried")
		p.says("No permission to patch, falling back to get and update")

		e.plugin.Next("CreateVolume", csitest.Fail(codes.ResourceExhausted, "full"))
		full := newClaim("full", late)
		full.Annotations = map[string]string{"volume.kubernetes.io/selected-node": e.nodes[0]}
		e.create(full)
		e.eventually("another node is asked for", func(context.Context) error {
			if node, is := e.get("full").Annotations["volume.kubernetes.io/selected-node"]; is {
				return fmt.Errorf("node %s", node)
			}
			return nil
		})
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"volume.kubernetes.io/selected-node":%q}}}`, e.nodes[1])
		if _, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Patch(t.Context(), "full", types.MergePatchType, patch,
			metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		e.bound("full")
		e.calls("CreateVolume", 5)
		e.agrees(3)
		e.leftovers("plain", "retried", "full")
		e.calls("DeleteVolume", 3)
	})
}

func (e *env) get(claim string) *corev1.PersistentVolumeClaim {
	e.t.Helper()
	pvc, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Get(e.t.Context(), claim, metav1.GetOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	return pvc
}
