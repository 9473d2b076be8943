// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc/codes"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// alert is one of the rules that are shipped.
type alert struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

func alerts(t *testing.T) []alert {
	t.Helper()
	text, err := os.ReadFile("../../deploy/monitoring/prometheus-rule.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return alertsOf(t, parsed(t, string(text))[0])
}

// alertsOf returns the alerts of a PrometheusRule.
func alertsOf(t *testing.T, o *unstructured.Unstructured) []alert {
	t.Helper()
	text, err := yaml.Marshal(o.Object)
	if err != nil {
		t.Fatal(err)
	}
	var rule struct {
		Spec struct {
			Groups []struct{ Rules []alert }
		}
	}
	if err := yaml.Unmarshal(text, &rule); err != nil {
		t.Fatal(err)
	}
	var all []alert
	for _, g := range rule.Spec.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

// queries is those of the dashboard, as it sends them.
func queries(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("../../deploy/grafana/storage-controller.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			ID      int
			Type    string
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	ids := map[int]bool{}
	variables := strings.NewReplacer("$__rate_interval", "5m", "$namespace", ".*", "$cluster", ".*", "$driver", ".*")
	var all []string
	for _, p := range dashboard.Panels {
		if ids[p.ID] || p.Title == "" || (len(p.Targets) == 0) != (p.Type == "row") {
			t.Errorf("panel %d %q has a number that is taken, no title or no query", p.ID, p.Title)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			all = append(all, variables.Replace(target.Expr))
		}
	}
	return all
}

// runbooks is the base of the URLs.
const runbooks = "https://github.com/storage-controller/storage-controller/blob/main/docs/runbooks/"

// TestEveryAlertHasItsRunbook, and every runbook its alert.
func TestEveryAlertHasItsRunbook(t *testing.T) {
	pages, err := filepath.Glob("../../docs/runbooks/*.md")
	if err != nil {
		t.Fatal(err)
	}
	without := map[string]bool{}
	for _, p := range pages {
		without[filepath.Base(p)] = true
	}
	delete(without, "README.md")
	index, err := os.ReadFile("../../docs/runbooks/README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range alerts(t) {
		delete(without, a.Alert+".md")
		if a.Annotations["runbook_url"] != runbooks+a.Alert+".md" || a.Annotations["summary"] == "" ||
			!slices.Contains([]string{"warning", "critical"}, a.Labels["severity"]) {
			t.Errorf("%s: annotations %v, labels %v", a.Alert, a.Annotations, a.Labels)
		}
		page, err := os.ReadFile("../../docs/runbooks/" + a.Alert + ".md")
		if err != nil {
			t.Error(err)
			continue
		}
		for _, part := range []string{"# " + a.Alert, "Severity: " + a.Labels["severity"], a.Expr, "## Meaning", "## Impact",
			"## Diagnosis", "## Mitigation"} {
			if !bytes.Contains(page, []byte(part)) {
				t.Errorf("the page of %s lacks %q", a.Alert, part)
			}
		}
		if !bytes.Contains(index, []byte("["+a.Alert+"]("+a.Alert+".md)")) {
			t.Errorf("the index lacks %s", a.Alert)
		}
	}
	for page := range without {
		t.Errorf("%s is of no alert", page)
	}
}

// ofKubeState lists the metrics in use of kube-state-metrics, with their documented labels.
var ofKubeState = map[string][]string{
	"kube_daemonset_status_desired_number_scheduled": {"namespace", "daemonset"},
	"kube_daemonset_status_number_unavailable":       {"namespace", "daemonset"},
	"kube_deployment_status_replicas_available":      {"namespace", "deployment"},
	"kube_persistentvolumeclaim_info":                {"namespace", "persistentvolumeclaim", "storageclass", "volumename"},
	"kube_persistentvolumeclaim_status_phase":        {"namespace", "persistentvolumeclaim", "phase"},
	"kube_pod_container_status_ready":                {"namespace", "pod", "uid", "container"},
	"kube_pod_status_phase":                          {"namespace", "pod", "uid", "phase"},
	"kube_storageclass_info":                         {"storageclass", "provisioner", "reclaim_policy", "volume_binding_mode"},
}

// ofTheTarget is the labels that Prometheus gives to what it scrapes by the PodMonitor, and that of the cluster.
var ofTheTarget = []string{"cluster", "namespace", "pod", "container", "job", "instance"}

var selector = regexp.MustCompile(`(\w+)\{([\w,]*)\}`)

// TestAlertsAndDashboardAskForWhatThereIs holds each metric and each label of the alerts and the
// dashboard against what a process with all roles shows.
func TestAlertsAndDashboardAskForWhatThereIs(t *testing.T) {
	t.Parallel()
	expressions := queries(t)
	for _, a := range alerts(t) {
		expressions = append(expressions, a.Expr)
	}
	out, err := tool(t, strings.Join(expressions, "\n"), "promql")
	if err != nil {
		t.Fatal(err)
	}
	wanted := map[string][]string{}
	for _, m := range selector.FindAllStringSubmatch(out, -1) {
		wanted[m[1]] = append(wanted[m[1]], strings.FieldsFunc(m[2], func(r rune) bool { return r == ',' })...)
	}
	if lines := strings.Count(out, "\n"); lines != len(expressions) || len(wanted) < 30 {
		t.Fatalf("%d lines for %d expressions, %d metrics", lines, len(expressions), len(wanted))
	}
	showsAll(t, everythingOn(t), wanted)
}

// showsAll waits until p shows everything that is wanted: some of it comes with the work.
func showsAll(t *testing.T, p *process, wanted map[string][]string) {
	t.Helper()
	var missing []string
	(&env{t: t}).eventually("every metric is there", func(context.Context) error {
		have := map[string][]string{}
		for name, family := range p.metrics() {
			for _, l := range family.GetMetric()[0].GetLabel() {
				have[name] = append(have[name], l.GetName())
			}
			have[name] = append(have[name], ofTheTarget...)
			if family.GetType() == dto.MetricType_HISTOGRAM {
				have[name+"_bucket"], have[name+"_count"], have[name+"_sum"] = append(have[name], "le"), have[name], have[name]
			}
		}
		maps.Copy(have, ofKubeState)
		missing = nil
		for name, labels := range wanted {
			if have[name] == nil {
				missing = append(missing, name)
			}
			for _, l := range labels {
				if have[name] != nil && !slices.Contains(have[name], l) {
					missing = append(missing, name+"{"+l+"}")
				}
			}
		}
		if slices.Sort(missing); len(missing) > 0 {
			return fmt.Errorf("missing: %v", missing)
		}
		return nil
	})
}

// everythingOn is a process with all roles and features, in which everything that is counted
// has happened once, as far as it is no defect.
func everythingOn(t *testing.T) *process {
	t.Helper()
	e := newEnv(t, csitest.Config{Segments: []map[string]string{{}}, Controller: []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY, csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
	}}, 2)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, err := e.client.StorageV1().CSIDrivers().Create(t.Context(),
		&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: e.plugin.Name()}}, metav1.CreateOptions{})
	must(err)
	certificates := t.TempDir()
	writePair(t, certificates)
	cmd := e.command("all", slices.Concat(quick, []string{"--leader-election", "--http-endpoint=127.0.0.1:0",
		"--capacity-ownerref-level=-1",
		"--topology-node-key=" + e.plugin.Name() + "/node", "--node-finalizer-mode=manage", "--node-cleanup=claims",
		"--node-cleanup-scope=all", "--node-delete-grace=0s", "--node-finalizer-wait-for-others=false", "--node-finalizer-timeout=1s",
		"--enable-webhooks", "--webhook-addr=127.0.0.1:0", "--cert-dir", certificates})...)
	cmd.Env = append(cmd.Env, "NAMESPACE="+e.ns)
	kubetest.InstallCRDs(t, e.cp) // or another test does meanwhile, and the snapshotter has no Lease yet
	p := e.start(cmd)
	p.leadsInAll(5)

	class := e.expandableClass()
	e.plugin.Next("ControllerExpandVolume", csitest.Fail(codes.Unavailable, "not yet"))
	e.plugin.Next("CreateVolume", csitest.Fail(codes.Unavailable, "not yet"))
	e.plugin.Next("ControllerPublishVolume", csitest.Fail(codes.Unavailable, "not yet"))
	e.claim("c", class)
	e.attach("a", e.bound("c"), e.nodes[0])
	e.attached(1)
	e.request("c", "2Gi", "")
	e.expanded("c", "2Gi")

	e.eventually("a node has the finalizer", func(ctx context.Context) error {
		n, err := e.client.CoreV1().Nodes().Get(ctx, e.nodes[1], metav1.GetOptions{})
		if err == nil && len(n.Finalizers) == 0 {
			err = fmt.Errorf("it has none")
		}
		return err
	})
	for _, name := range []string{"lost", "held"} { // of which one may go, and the other is in use
		e.onNode(name, class, e.plugin.Name()+"/node", "b")
	}
	e.uses("user", "held", e.nodes[0])
	must(e.client.CoreV1().Nodes().Delete(t.Context(), e.nodes[1], metav1.DeleteOptions{}))
	must(e.client.StorageV1().CSINodes().Delete(t.Context(), e.nodes[1], metav1.DeleteOptions{}))
	e.approved("b")

	p.says("Serving admission webhooks")
	address := regexp.MustCompile(`Serving admission webhooks.*"address": "([^"]+)"`).FindStringSubmatch(p.logged())
	if address == nil {
		t.Fatal("it does not say where its webhooks are")
	}
	e.eventually("the webhook refuses a request that is no AdmissionReview", func(context.Context) error {
		response, err := selfSigned.Post("https://"+address[1]+"/pod/mutate", "application/json", strings.NewReader("none"))
		if err == nil {
			err = response.Body.Close()
		}
		return err
	})
	return p
}

// selfSigned calls servers whose authority is their own.
var selfSigned = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
