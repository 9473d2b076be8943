// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// history is what Prometheus would have: scrapes of real processes, whose times are those of
// the story that a test tells, a minute apart.
type history struct {
	Scrapes     []scraped `json:"scrapes"`
	Expressions []string  `json:"expressions"`
	Rules       []ruled   `json:"rules"`
	// Clocks are the gauges that nothing resets while the story continues after its last scrape.
	Clocks []string `json:"clocks"`
	now    int64
}

type scraped struct {
	At     int64             `json:"at"`
	Labels map[string]string `json:"labels"`
	Text   string            `json:"text"`
	// Again is for how many minutes metrics continue as before this scrape.
	Again int64 `json:"again"`
}

type ruled struct {
	Expression string `json:"expression"`
	For        int64  `json:"for"`
}

// answers is what the engine of Prometheus says to a history: the series of each.
type answers struct{ Expressions, Rules [][]string }

func newHistory() *history { return &history{now: time.Now().Unix()} }

// minute lets one pass, and scrapes p as the pods with these names.
func (h *history) minute(p *process, pods ...string) {
	p.t.Helper()
	h.now += 60
	_, text := p.get("/metrics")
	for _, pod := range pods {
		h.Scrapes = append(h.Scrapes, scraped{h.now, target(pod, "8080"), text, 0})
	}
}

// target returns the labels that the PodMonitor gives to the metrics at a port of a pod, and that of the cluster.
func target(pod, port string) map[string]string {
	return map[string]string{"cluster": "one", "namespace": "n", "pod": pod, "instance": pod + ":" + port}
}

// cluster adds what kube-state-metrics would show of the claims of e and of a class.
func (h *history) cluster(e *env, class string) {
	e.t.Helper()
	claims, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).List(e.t.Context(), metav1.ListOptions{})
	e.must(err)
	c, err := e.client.StorageV1().StorageClasses().Get(e.t.Context(), class, metav1.GetOptions{})
	e.must(err)
	var b strings.Builder
	fmt.Fprintf(&b, "kube_storageclass_info{storageclass=%q,provisioner=%q,volume_binding_mode=%q} 1\n", c.Name, c.Provisioner,
		*c.VolumeBindingMode)
	for _, claim := range claims.Items {
		of := fmt.Sprintf("namespace=%q,persistentvolumeclaim=%q", claim.Namespace, claim.Name)
		fmt.Fprintf(&b, "kube_persistentvolumeclaim_info{%s,storageclass=%q,volumename=%q} 1\n", of, *claim.Spec.StorageClassName,
			claim.Spec.VolumeName)
		for _, phase := range []corev1.PersistentVolumeClaimPhase{corev1.ClaimPending, corev1.ClaimBound, corev1.ClaimLost} {
			is := 0
			if claim.Status.Phase == phase {
				is = 1
			}
			fmt.Fprintf(&b, "kube_persistentvolumeclaim_status_phase{%s,phase=%q} %d\n", of, phase, is)
		}
	}
	h.Scrapes = append(h.Scrapes, scraped{h.now, ofKubeStateMetrics, b.String(), 0})
}

// finds evaluates expressions at the end of h: which series each of them has.
func (h history) finds(t *testing.T, expressions ...string) [][]string {
	t.Helper()
	h.Expressions, h.Rules = expressions, nil
	return h.asked(t).Expressions
}

func (h history) asked(t *testing.T) (a answers) {
	t.Helper()
	in, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	out, err := tool(t, string(in), "evaluate")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(out), &a); err != nil || len(a.Expressions) != len(h.Expressions) || len(a.Rules) != len(h.Rules) {
		t.Fatalf("%d answers for %d expressions, %d for %d rules: %v", len(a.Expressions), len(h.Expressions), len(a.Rules), len(h.Rules),
			err)
	}
	return a
}

// longest is longer than any alert looks back and waits together.
const longest = 90 * time.Minute

// fires checks that these alerts fire, and no others, when metrics continue as in the last minute of h;
// and that the queries of the dashboard can be evaluated. The processes of h also run in a second cluster, beside a
// second driver and sidecars of other drivers. The alerts of a release of the chart fire for its own driver only.
func (h history) fires(t *testing.T, want ...string) {
	t.Helper()
	first := h.driver()
	h.Expressions, h.Rules, h.Scrapes = queries(t), nil, append(slices.Clone(h.Scrapes), h.neighbours()...)
	for i := range h.Scrapes {
		if h.Scrapes[i].At == h.now {
			h.Scrapes[i].Again = int64(longest.Minutes())
		}
	}
	slices.Sort(want)
	sources := [][]alert{alerts(t), chartAlerts(t, "csi-controller", first, "all-in-one"),
		chartAlerts(t, "second", "second.example.com", "all-in-one")}
	var all []alert
	var sourceOf []int
	for source, list := range sources {
		for _, a := range list {
			lasts, err := time.ParseDuration(a.For)
			if err != nil {
				t.Fatalf("%s: %v", a.Alert, err)
			}
			h.Rules = append(h.Rules, ruled{a.Expr, int64(lasts.Seconds())})
			all, sourceOf = append(all, a), append(sourceOf, source)
		}
	}
	got := make([][]string, len(sources))
	for i, series := range h.asked(t).Rules {
		if len(series) == 0 {
			continue
		}
		got[sourceOf[i]] = append(got[sourceOf[i]], strings.TrimPrefix(all[i].Alert, "StorageController"))
		t.Logf("%s: %v", all[i].Alert, series)
		for _, labels := range series {
			ofKube := strings.HasPrefix(all[i].Expr, "kube_") // these alerts are about pods
			if !strings.Contains(labels, `cluster="`) || !ofKube && !strings.Contains(labels, fmt.Sprintf("driver_name=%q", first)) {
				t.Errorf("%s: the labels %s do not name the cluster and the driver", all[i].Alert, labels)
			}
		}
	}
	for i, want := range [][]string{want, want, nil} {
		if slices.Sort(got[i]); !slices.Equal(got[i], want) {
			t.Errorf("the alerts %v of %s fire, want %v", got[i], []string{"deploy/monitoring", "the chart", "another release"}[i], want)
		}
	}
}

var driverInfo = regexp.MustCompile(`storage_controller_driver_info\{driver_name="([^"]+)"\}`)

// driver returns the name of the driver of the scraped processes.
func (h history) driver() string {
	for _, s := range h.Scrapes {
		if found := driverInfo.FindStringSubmatch(s.Text); found != nil {
			return found[1]
		}
	}
	return "first.example.com"
}

// neighbours returns, for the times of h, scrapes of its processes in a second cluster, of a second driver that
// works, and of sidecars of other drivers that do not. One of these sidecars is in the pod "a" of h.
func (h history) neighbours() (all []scraped) {
	const second = `storage_controller_driver_info{driver_name="second.example.com"} 1
leader_election_master_status{name="second-example-com"} 1
csi_sidecar_operations_seconds_count{driver_name="second.example.com",method_name="/csi.v1.Identity/Probe",grpc_status_code="OK"} 1
`
	const foreign = `leader_election_master_status{name="foreign"} %[1]d
leader_election_master_status{name="without-leader"} 0
workqueue_depth{name="claims"} 1000
workqueue_longest_running_processor_seconds{name="claims"} 100000
# TYPE csi_sidecar_operations_seconds histogram
csi_sidecar_operations_seconds_bucket{driver_name="foreign",method_name="/csi.v1.Controller/X",grpc_status_code="Internal",le="600"} 0
csi_sidecar_operations_seconds_bucket{driver_name="foreign",method_name="/csi.v1.Controller/X",grpc_status_code="Internal",le="+Inf"} %[2]d
csi_sidecar_operations_seconds_count{driver_name="foreign",method_name="/csi.v1.Controller/X",grpc_status_code="Internal"} %[2]d
csi_sidecar_operations_seconds_sum{driver_name="foreign",method_name="/csi.v1.Controller/X",grpc_status_code="Internal"} %[2]d
`
	seen := map[int64]bool{}
	for _, s := range h.Scrapes {
		if s.Labels["pod"] != "" {
			other := maps.Clone(s.Labels)
			other["cluster"] = "two"
			all = append(all, scraped{s.At, other, s.Text, 0})
		}
		if seen[s.At] {
			continue
		}
		seen[s.At] = true
		all = append(all, scraped{s.At, target("second-5d8c-x2z", "8080"), second, 0})
		for _, labels := range []map[string]string{target("a", "9090"), target("foreign", "8080")} {
			all = append(all, scraped{s.At, labels, fmt.Sprintf(foreign, 1, 100*len(seen)), 0})
		}
	}
	return all
}

var renderedRules sync.Map

// chartAlerts returns the alerts of a release of the chart in the namespace "n".
func chartAlerts(t *testing.T, release, driver, mode string) []alert {
	t.Helper()
	text, found := renderedRules.Load(release + " " + mode)
	if !found {
		values := valuesFile(t, "image: {repository: x, tag: v1}\ndriver: {name: DRIVER, image: {repository: x, tag: v1}}\n"+
			"metrics: {prometheusRule: {enabled: true}}\nmode: "+mode)
		rendered, err := tool(t, "", "helm", chart, release, "n", values)
		if err != nil {
			t.Fatal(err)
		}
		text, _ = renderedRules.LoadOrStore(release+" "+mode, rendered)
	}
	for _, o := range parsed(t, strings.ReplaceAll(text.(string), "DRIVER", driver)) {
		if o.GetKind() == "PrometheusRule" {
			return alertsOf(t, o)
		}
	}
	t.Fatal("the chart has no PrometheusRule")
	return nil
}

// watched is an environment and a process with all roles that it has scraped as leader.
func watched(t *testing.T, args ...string) (*env, *process, *history) {
	t.Helper()
	e := newEnv(t, csitest.Config{Segments: []map[string]string{{}}, Controller: []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY, csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
	}}, 2)
	cmd := e.command("all", slices.Concat(quick, []string{"--leader-election", "--http-endpoint=127.0.0.1:0",
		"--capacity-ownerref-level=-1",
		"--capacity-poll-interval=1s", "--reconcile-sync=1s"}, args)...)
	cmd.Env = append(cmd.Env, "NAMESPACE="+e.ns)
	p := e.start(cmd)
	p.leadsInAll(3)
	h := newHistory()
	h.minute(p, "a")
	return e, p, h
}

// leadsInAll waits until p holds all its Leases, of which there are n at least.
func (p *process) leadsInAll(n int) {
	p.t.Helper()
	(&env{t: p.t}).eventually("every role leads", func(context.Context) error {
		leads := p.metrics()["leader_election_master_status"].GetMetric()
		for _, l := range leads {
			if l.GetGauge().GetValue() != 1 {
				return fmt.Errorf("%v", l)
			}
		}
		if len(leads) < n {
			return fmt.Errorf("%d Leases", len(leads))
		}
		return nil
	})
}

// TestNoAlertFiresWhereAllIsWell: none does for a process that works, and it is no silence of
// metrics that are missing.
func TestNoAlertFiresWhereAllIsWell(t *testing.T) {
	t.Parallel()
	e, p, h := watched(t)
	class := e.class(false, nil)
	e.claim("c", class)
	e.attach("a", e.bound("c"), e.nodes[0])
	e.attached(1)
	h.minute(p, "a")
	h.cluster(e, class)
	h.fires(t)
	e.detach("a")
	e.attached(0)
	e.leftovers("c")
	h.minute(p, "a")
	h.fires(t)
	for i, series := range h.finds(t, `csi_sidecar_operations_seconds_count{grpc_status_code="OK",method_name=~".*/ControllerPublishVolume"} > 0`,
		`leader_election_master_status == 1`, `storage_controller_attach_comparisons_total{result="ok"} > 0`) {
		if len(series) == 0 {
			t.Errorf("expression %d has found nothing", i)
		}
	}
}

// TestAlertsFireForTheirCause: the driver fails at everything.
func TestAlertsFireForTheirCause(t *testing.T) {
	t.Parallel()
	e, p, h := watched(t)
	class := e.class(false, nil)
	e.claim("c", class)
	volume := e.bound("c")
	e.pool("late", nil)
	e.published(2)
	e.plugin.Always("CreateVolume", csitest.Fail(codes.Aborted, "pending"))
	for _, method := range []string{"ControllerPublishVolume", "GetCapacity", "ListVolumes"} {
		e.plugin.Always(method, csitest.Fail(codes.Internal, "broken"))
	}
	e.claim("stuck", class)
	e.attach("a", volume, e.nodes[0])
	var before map[string]float64
	for _, more := range []float64{1, 5} { // a counter has grown only if it was there before
		e.eventually("everything has failed", func(context.Context) error {
			for name, n := range p.failures() {
				if n < before[name]+more {
					return fmt.Errorf("%s: %v", name, n)
				}
			}
			if p.value("storage_controller_capacity_failing", "") == 0 {
				return fmt.Errorf("capacity does not fail")
			}
			return nil
		})
		before = p.failures()
		h.minute(p, "a")
	}
	h.cluster(e, class)
	h.fires(t, "AttachFails", "CapacityFails", "ClaimsPending", "ComparisonFails", "DriverFails", "VolumesIndeterminate")
}

// failures returns how many failures p has counted.
func (p *process) failures() map[string]float64 {
	p.t.Helper()
	n, metrics := map[string]float64{}, p.metrics()
	for name, label := range map[string]string{
		"csi_sidecar_operations_seconds": "/csi.v1.Controller/CreateVolume", "storage_controller_attach_failures_total": "Internal",
		"storage_controller_attach_comparisons_total": "error",
	} {
		n[name] = 0
		for _, m := range metrics[name].GetMetric() {
			if labels := labelsOf(m); strings.Contains(labels, "="+label) && !strings.Contains(labels, "=OK") {
				n[name] += m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return n
}

// TestAlertsAboutLeases: one that no process holds, and one that two claim to hold.
func TestAlertsAboutLeases(t *testing.T) {
	t.Parallel()
	_, leader, both := watched(t)
	both.minute(leader, "a", "b")
	both.fires(t, "TwoLeaders")

	e := newEnv(t,
		csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME}}, 1)
	now := metav1.NowMicro()
	_, err := e.client.CoordinationV1().Leases(e.ns).Create(t.Context(), &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: e.provisionerLease()},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("gone"), LeaseDurationSeconds: ptr.To[int32](3600), RenewTime: &now,
			AcquireTime: &now},
	}, metav1.CreateOptions{})
	e.must(err)
	waits := e.run("provision", "--leader-election", "--http-endpoint=127.0.0.1:0", "--leader-election-namespace="+e.ns)
	e.eventually("it shows the Lease", func(context.Context) error {
		if len(waits.metrics()["leader_election_master_status"].GetMetric()) == 0 {
			return fmt.Errorf("it does not")
		}
		return nil
	})
	h := newHistory()
	h.minute(waits, "a")
	h.fires(t, "NoLeader")
}

// TestAlertsAboutNodes: the clean-up has something to do, and something that it may not do.
func TestAlertsAboutNodes(t *testing.T) {
	t.Parallel()
	p, h := everythingOn(t), newHistory()
	e := &env{t: t}
	e.eventually("a lost node is counted, and a volume that is in use", func(context.Context) error {
		var blocked float64
		for _, m := range p.metrics()["storage_controller_cleanup_blocked"].GetMetric() {
			if !slices.Contains([]string{"gate=mode", "gate=scope", "gate=grace", "gate=rate"}, labelsOf(m)) {
				blocked += m.GetGauge().GetValue()
			}
		}
		if missing := p.value("storage_controller_nodes_missing", ""); missing == 0 || blocked == 0 {
			return fmt.Errorf("%v nodes, %v volumes", missing, blocked)
		}
		return nil
	})
	h.minute(p, "a")
	h.fires(t, "NodesMissing", "CleanupBlocked")
}
