// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
)

// fakeWorkload is a Deployment with its pods and their status pages, in front of an API server in memory.
type fakeWorkload struct {
	deployment appsv1.Deployment
	pods       []corev1.Pod
	page       func(pod string) http.Handler // of what listens on port 8080

	mu       sync.Mutex
	requests []string // for pages
}

const workloadNamespace = "kube-system"

// newWorkload returns a Deployment with a pod for each of names, in which its container runs.
func newWorkload(names ...string) *fakeWorkload {
	w := &fakeWorkload{}
	labels := map[string]string{"app": "controller"}
	w.deployment = appsv1.Deployment{
		TypeMeta:   metav1.TypeMeta{APIVersion: "apps/v1", Kind: "Deployment"},
		ObjectMeta: metav1.ObjectMeta{Name: "controller", Namespace: workloadNamespace},
		Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			Spec: corev1.PodSpec{ServiceAccountName: "csi", Containers: []corev1.Container{
				{Name: "driver", Image: "driver:v1", Args: []string{"--timeout=1s"}},
				{Name: "controller", Image: "mirror.example/abc:v1", Args: []string{"all", "--timeout=$(TIMEOUT)"},
					Ports: []corev1.ContainerPort{{Name: "webhook", ContainerPort: 9443}, {Name: "http", ContainerPort: 8080}}},
			}},
		}},
	}
	for _, name := range names {
		w.pods = append(w.pods, corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: workloadNamespace, Labels: labels},
			Spec:       w.deployment.Spec.Template.Spec,
			Status: corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{
				{Name: "driver", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "Other"}}},
				{Name: "controller", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}},
			}},
		})
	}
	return w
}

// container returns the container that runs roles.
func (w *fakeWorkload) container() *corev1.Container {
	return &w.deployment.Spec.Template.Spec.Containers[1]
}

// state sets the state of the container in the first pod.
func (w *fakeWorkload) state(s corev1.ContainerStatus) {
	s.Name = "controller"
	w.pods[0].Status.ContainerStatuses[1] = s
}

// serve returns the kubeconfig of an API server with w.
func (w *fakeWorkload) serve(t *testing.T) string {
	t.Helper()
	pods := "/api/v1/namespaces/" + workloadNamespace + "/pods"
	answer := func(rw http.ResponseWriter, object any) {
		rw.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(rw).Encode(object); err != nil {
			t.Error(err)
		}
	}
	return kubetest.WriteKubeconfig(t, kubetest.Proxy(t, kubetest.Get(t).Config(), func(rw http.ResponseWriter, r *http.Request,
		pass http.Handler) {
		name, page := strings.CutSuffix(strings.TrimPrefix(r.URL.Path, pods+"/"), ":8080/proxy/statusz")
		switch {
		case r.URL.Path == "/apis/apps/v1/namespaces/"+workloadNamespace+"/deployments/controller":
			answer(rw, w.deployment)
		case r.URL.Path == pods:
			answer(rw, corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, Items: w.pods})
		case page:
			w.mu.Lock()
			w.requests = append(w.requests, name+"?"+r.URL.RawQuery)
			w.mu.Unlock()
			w.page(name).ServeHTTP(rw, r)
		default:
			pass.ServeHTTP(rw, r)
		}
	}))
}

// describing returns the status page of a process with args, which lacks permissions.
func describing(t *testing.T, args []string, missing ...rbac.Access) http.Handler {
	t.Helper()
	line, err := parseCommandLine("test", slices.Concat([]string{programName, "all"}, args))
	if err != nil {
		t.Fatal(err)
	}
	c, err := line.roles.Read(line.flags, "v7")
	if err != nil {
		t.Fatal(err)
	}
	driver := csiclient.Driver{Name: "drv.example.com", VendorVersion: "3.4", Plugin: csiclient.PluginCapabilities{ControllerService: true},
		Controller: csiclient.ControllerCapabilities{PublishUnpublishVolume: true}}
	plan := c.Plan(driver, true)
	plan.PodNamespace = workloadNamespace
	return statusz.Handler(func() statusz.Page {
		return statusz.Page{Program: programName, Version: "v7", Started: time.Unix(0, 0).UTC(),
			Checks: []statusz.Check{{Kind: "readyz", Name: "driver"}},
			Roles:  []statusz.Role{{Name: "attacher"}, {Name: "capacity", Disabled: "no owner"}}}
	}, func(_ context.Context, permissions bool) (*doctor.Plan, *doctor.Permissions, error) {
		if !permissions {
			return &plan, nil, nil
		}
		return &plan, &doctor.Permissions{Time: time.Unix(60, 0).UTC(), User: "system:serviceaccount:other:own", Missing: missing}, nil
	})
}

// wantChecks fails the test unless the report of doctor with args has checks with the status and a part of the message or hint of
// those in want.
func wantChecks(t *testing.T, wantCode int, args []string, want ...finding.Finding) doctor.Report {
	t.Helper()
	code, stdout, stderr := output(t, slices.Concat([]string{programName, "doctor", "-o", "json"}, args)...)
	var report doctor.Report
	if err := json.Unmarshal([]byte(stdout), &report); err != nil || code != wantCode {
		t.Fatalf("%v, exit code %d, want %d: %s%s", err, code, wantCode, stdout, stderr)
	}
	for _, w := range want {
		if !slices.ContainsFunc(report.Findings, func(c finding.Finding) bool {
			return c.Topic == w.Topic && c.Severity == w.Severity && strings.Contains(c.Message, w.Message) && strings.Contains(c.Next,
				w.Next)
		}) {
			t.Errorf("no check %+v in %s", w, stdout)
		}
	}
	return report
}

// TestDoctorAsksTheProcesses: plan and permissions are those that the processes of a workload report.
func TestDoctorAsksTheProcesses(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	status := rbac.Access{Verb: "patch", Group: "storage.k8s.io", Resource: "volumeattachments/status"}
	w := newWorkload("p1", "p2", "p3")
	w.pods[0].Status.Phase = corev1.PodFailed // evicted, and replaced
	first := describing(t, []string{"--kube-api-burst=3"}, status)
	second := describing(t, []string{"--kube-api-burst=3", "--otlp-sampling-ratio=0.5"})
	w.page = func(pod string) http.Handler {
		if pod == "p2" {
			return first
		}
		return second
	}
	base := []string{"-n", workloadNamespace, "deployment/controller", "--kubeconfig=" + w.serve(t)}
	account := "system:serviceaccount:" + workloadNamespace + ":csi"
	report := wantChecks(t, exitFindings, base,
		finding.Finding{Topic: "process", Severity: finding.OK, Message: "pod p2: version v7, started at 1970-01-01T00:00:00Z"},
		finding.Finding{Topic: "process", Severity: finding.OK, Message: "pod p3: version v7"},
		finding.Finding{Topic: "process", Severity: finding.Warning, Message: "as system:serviceaccount:other:own, not as " + account},
		finding.Finding{Topic: "role capacity", Severity: finding.Warning, Message: "pod p3: disabled: no owner"},
		finding.Finding{Topic: "driver", Severity: finding.OK, Message: "drv.example.com, version 3.4"},
		finding.Finding{Topic: "capabilities", Severity: finding.OK, Message: "PUBLISH_UNPUBLISH_VOLUME"},
		finding.Finding{Topic: "flags", Severity: finding.Warning, Message: "kube-api-burst (flag) has no effect"},
		finding.Finding{Topic: "flags", Severity: finding.Warning, Message: "otlp-endpoint is not set (pod p3)"},
		finding.Finding{Topic: "rbac", Severity: finding.OK, Message: "reviewed by the process at 1970-01-01T00:01:00Z"},
		finding.Finding{Topic: "rbac attacher", Severity: finding.Failing,
			Message: "not granted: patch volumeattachments/status.storage.k8s.io"},
		finding.Finding{Topic: "csidriver", Severity: finding.Warning, Message: "drv.example.com"},
		finding.Finding{Topic: "sidecars", Severity: finding.OK, Message: "in namespace " + workloadNamespace},
	)
	if report.Driver != "drv.example.com" || slices.ContainsFunc(report.Findings,
		func(c finding.Finding) bool { return c.Topic == "socket" }) {
		t.Errorf("%+v", report)
	}
	slices.Sort(w.requests)
	if want := []string{"p2?format=json&permissions=1&timeout=1m30s", "p3?format=json&timeout=1m30s"}; !slices.Equal(w.requests, want) {
		t.Errorf("requests for %q, want %q", w.requests, want)
	}
	// The account is that of the workload.
	code, stdout, stderr := output(t, slices.Concat([]string{programName, "doctor"}, base,
		[]string{"--print-rbac", "--driver-name=drv.example.com"})...)
	if code != 0 || !strings.Contains(stdout, "# attacher: not granted: patch volumeattachments/status.storage.k8s.io\n") ||
		!strings.Contains(stdout, "{kind: ServiceAccount, name: csi, namespace: kube-system}") || strings.Contains(stdout, "provisioner") {
		t.Errorf("exit code %d: %s%s", code, stdout, stderr)
	}
	w.requests = nil
	if _, stdout, _ := output(t, slices.Concat([]string{programName, "doctor"}, base, []string{"--as=a/b"})...); !strings.Contains(
		stdout, " rbac attacher ") || strings.Contains(stdout, "reviewed by the process") {
		t.Errorf("the permissions of another user: %s", stdout)
	}
	if slices.ContainsFunc(w.requests, func(r string) bool { return strings.Contains(r, "permissions") }) {
		t.Errorf("reviews for another user: %q", w.requests)
	}
}

// TestDoctorOfManyPods: not every page is read, but each pod that does not run is reported.
func TestDoctorOfManyPods(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	var names []string
	for i := range maxPages + 2 {
		names = append(names, fmt.Sprintf("p%d", i))
	}
	w := newWorkload(names...)
	w.pods[len(names)-1].Status = corev1.PodStatus{Phase: corev1.PodPending}
	page := describing(t, nil)
	w.page = func(string) http.Handler { return page }
	wantChecks(t, exitFindings, []string{"-n", workloadNamespace, "deployment/controller", "--kubeconfig=" + w.serve(t)},
		finding.Finding{Topic: "process", Severity: finding.Unknown, Message: "in 21 pods, of which the first 20 were asked"},
		finding.Finding{Topic: "process", Severity: finding.Failing, Message: "pod p21: is Pending"})
	if len(w.requests) != maxPages {
		t.Errorf("%d pages were read", len(w.requests))
	}
}

// TestDoctorOfAnIntruder: a container that lies about its process gets no other permissions than those of deploy/rbac, and none in
// another namespace or for another account or driver.
func TestDoctorOfAnIntruder(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	wildcard := rbac.Access{Verb: "*", Group: "*", Resource: "*"}
	secrets := rbac.Of("provisioner-secrets", "")
	leases, elsewhere := rbac.Of("attacher-leader-election", workloadNamespace), rbac.Of("provisioner-leader-election", "other")
	plan := doctor.Plan{
		Driver: csiclient.Driver{Name: "victim.example.com"}, Known: true,
		Findings: []finding.Finding{{Topic: "a", Severity: finding.OK, Message: "b\x1b[2J\nok       rbac"}},
		Grants: []rbac.Grant{
			{File: "attacher", Accesses: []rbac.Access{wildcard}},
			{File: "../attacher", Accesses: []rbac.Access{wildcard}},
			{File: "provisioner-secrets", Accesses: secrets},
			{File: "provisioner-leader-election", Namespace: "other", Accesses: elsewhere},
			{File: "attacher-leader-election", Namespace: workloadNamespace, Accesses: leases},
		},
	}
	w := newWorkload("p1")
	w.page = func(string) http.Handler {
		return statusz.Handler(func() statusz.Page { return statusz.Page{Program: programName} },
			func(context.Context, bool) (*doctor.Plan, *doctor.Permissions, error) {
				missing := slices.Concat(secrets, leases, elsewhere, []rbac.Access{wildcard})
				return &plan, &doctor.Permissions{User: "system:serviceaccount:other:own", Missing: missing}, nil
			})
	}
	base := []string{"-n", workloadNamespace, "deployment/controller", "--kubeconfig=" + w.serve(t), "--driver-name=drv.example.com"}
	code, stdout, stderr := output(t, slices.Concat([]string{programName, "doctor"}, base, []string{"--print-rbac"})...)
	if code != exitFailure || !strings.Contains(stderr, "rbac attacher") { // they are not checked
		t.Errorf("exit code %d: %s", code, stderr)
	}
	for _, kind := range []string{"Role", "RoleBinding"} {
		if strings.Count(stdout, "kind: "+kind+"\n") != 1 {
			t.Errorf("not one %s in\n%s", kind, stdout)
		}
	}
	if strings.Contains(stdout, "other") || strings.Contains(stdout, "Cluster") || strings.Contains(stdout, "secrets") {
		t.Errorf("too much is granted:\n%s", stdout)
	}
	wantChecks(t, exitFindings, base,
		finding.Finding{Topic: "driver", Severity: finding.Failing, Message: `serves the driver "victim.example.com"`},
		finding.Finding{Topic: "rbac provisioner-leader-election", Severity: finding.Failing,
			Next: "if the process should use namespace other"},
		finding.Finding{Topic: "rbac provisioner-secrets", Severity: finding.Unknown},
	)
	_, text, _ := output(t, slices.Concat([]string{programName, "doctor"}, base)...)
	if strings.Contains(text, "\x1b") || strings.Contains(text, "\nok       rbac\n") {
		t.Errorf("control characters in %q", text)
	}
}

// TestDoctorOfAStatusURL: the page of --status-url has the plan and the permissions.
func TestDoctorOfAStatusURL(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	status := rbac.Access{Verb: "patch", Group: "storage.k8s.io", Resource: "volumeattachments/status"}
	server := httptest.NewServer(describing(t, nil, status))
	defer server.Close()
	kubeconfig := "--kubeconfig=" + kubetest.Get(t).Kubeconfig()
	wantChecks(t, exitFindings, []string{"--status-url=" + server.URL, kubeconfig, "--v=1"},
		finding.Finding{Topic: "process", Severity: finding.OK, Message: server.URL + ": version v7"},
		finding.Finding{Topic: "driver", Severity: finding.OK, Message: "drv.example.com"},
		finding.Finding{Topic: "rbac attacher", Severity: finding.Failing, Message: "volumeattachments/status"},
	)
	for mistake, tt := range map[string]struct {
		code int
		args []string
	}{
		"connection refused":                                {exitFailure, []string{"--status-url=http://127.0.0.1:1"}},
		"--timeout: has no effect on a running process":     {exitUsage, []string{"--status-url=" + server.URL, "--timeout=3s"}},
		"--status-url: names a process":                     {exitUsage, []string{"--status-url=" + server.URL, "deployment/x"}},
		"requires a workload or a command":                  {exitUsage, []string{"--status-url=" + server.URL, "--print-rbac"}},
		"--print-rbac: set --driver-name":                   {exitUsage, []string{"deployment/x", "--print-rbac"}},
		"--status-url: must be a URL":                       {exitUsage, []string{"--status-url=localhost"}},
		"require an https --status-url":                     {exitUsage, []string{"--status-ca-file=x"}},
		"--controllers: has no effect on a running process": {exitUsage, []string{"deployment/x", "--controllers=attacher"}},
	} {
		args := slices.Concat([]string{programName, "doctor", kubeconfig}, tt.args)
		if code, _, stderr := output(t, args...); code != tt.code || !strings.Contains(stderr, mistake) {
			t.Errorf("%q: exit code %d, want %d with %q: %s", args, code, tt.code, mistake, stderr)
		}
	}
}

// TestNoProcessAnswers: doctor reports why, and what to do.
func TestNoProcessAnswers(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	respond := func(code int, body string) func(string) http.Handler {
		return func(string) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if strings.HasPrefix(body, "{") {
					w.Header().Set("Content-Type", "application/json")
				}
				w.WriteHeader(code)
				fmt.Fprint(w, body)
			})
		}
	}
	const describe, exec, forward = "kubectl describe -n kube-system pod/p1",
		"kubectl exec -n kube-system p1 -c controller -- /storage-controller doctor",
		"kubectl port-forward -n kube-system pod/p1 8080, and storage-controller doctor --status-url="
	exited := &corev1.ContainerStateTerminated{ExitCode: 2, Reason: "Error", Message: "unknown flag: --nope\n"}
	for name, tt := range map[string]struct {
		change         func(*fakeWorkload)
		message, hints string // parts, the hints with | between them
	}{
		"no pod": {func(w *fakeWorkload) {
			w.pods = nil
			w.deployment.Status.Conditions = []appsv1.DeploymentCondition{
				{Type: "ReplicaFailure", Status: "True", Reason: "FailedCreate", Message: "exceeded quota"}}
		}, "deployment/controller in namespace kube-system has no pod; ReplicaFailure=True (FailedCreate): exceeded quota",
			"kubectl describe -n kube-system deployment/controller"},
		"no replica": {func(w *fakeWorkload) { w.pods, w.deployment.Spec.Replicas = nil, ptr.To[int32](0) },
			"has no pod: its replicas are 0", "kubectl describe"},
		"a pod that ends": {func(w *fakeWorkload) { w.pods[0].DeletionTimestamp = ptr.To(metav1.Now()) }, "has no pod", "kubectl describe"},
		"pending": {func(w *fakeWorkload) {
			w.pods[0].Status = corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{
				{Type: "PodScheduled", Status: "False", Reason: "Unschedulable", Message: "0/3 nodes are available"}}}
		}, "pod p1: is Pending; PodScheduled=False (Unschedulable): 0/3 nodes are available", describe},
		"waiting": {func(w *fakeWorkload) {
			w.state(corev1.ContainerStatus{State: corev1.ContainerState{
				Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "no such image"}}})
		}, "pod p1: container controller waits: ImagePullBackOff: no such image", describe},
		"crash loop": {func(w *fakeWorkload) {
			w.state(corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
				LastTerminationState: corev1.ContainerState{Terminated: exited}})
		}, "controller waits: CrashLoopBackOff; it exited with code 2 (Error): unknown flag: --nope",
			"kubectl logs -n kube-system p1 -c controller --previous"},
		"exited": {func(w *fakeWorkload) {
			w.state(corev1.ContainerStatus{State: corev1.ContainerState{Terminated: exited}})
		}, "controller does not run; it exited with code 2 (Error): unknown flag: --nope", "kubectl logs"},
		"no port": {func(w *fakeWorkload) { w.container().Ports = w.container().Ports[:1] },
			"neither a port called http-endpoint", exec},
		"TLS": {func(w *fakeWorkload) {
			w.page = respond(http.StatusBadRequest, "Client sent an HTTP request to an HTTPS server.\n")
		}, "HTTP status 400: Client sent an HTTP request to an HTTPS server.",
			exec + "|" + forward + "https://127.0.0.1:8080 --status-insecure-skip-tls-verify"},
		"no token": {func(w *fakeWorkload) {
			w.page = respond(http.StatusUnauthorized, "valid bearer token required\n")
		}, "HTTP status 401: valid bearer token required", exec + "|" + forward + "https://127.0.0.1:8080"},
		"forbidden": {func(w *fakeWorkload) {
			w.page = respond(http.StatusForbidden, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,`+
				`"message":"pods \"p1\" is forbidden: User \"jane\" cannot get resource \"pods/proxy\""}`)
		}, `User "jane" cannot get resource "pods/proxy"`, exec + "|" + forward + "http://127.0.0.1:8080"},
		"connection refused": {func(w *fakeWorkload) {
			w.page = respond(http.StatusServiceUnavailable, `{"kind":"Status","apiVersion":"v1","status":"Failure",`+
				`"reason":"ServiceUnavailable","code":503,"message":"error trying to reach service: connection refused"}`)
		}, "the status page: error trying to reach service: connection refused", exec + "|" + forward},
		"another page": {func(w *fakeWorkload) { w.page = respond(http.StatusOK, `{"program":""}`) },
			"the response is not the status page of storage-controller", exec + "|" + forward},
		"no plan": {func(w *fakeWorkload) {
			w.page = respond(http.StatusOK, `{"program":"storage-controller","version":"v1"}`)
		},
			"the response is not the status page of storage-controller", exec},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorkload("p1")
			tt.change(w)
			base := []string{"-n", workloadNamespace, "deployments/controller", "--kubeconfig=" + w.serve(t)}
			var want []finding.Finding
			for hint := range strings.SplitSeq(tt.hints, "|") {
				want = append(want, finding.Finding{Topic: "process", Severity: finding.Failing, Message: tt.message, Next: hint})
			}
			if report := wantChecks(t, exitFindings, base, want...); len(report.Findings) != 1 || !report.Reached {
				t.Errorf("more than one check: %+v", report)
			}
			code, stdout, stderr := output(t, slices.Concat([]string{programName, "doctor"}, base,
				[]string{"--print-rbac", "--driver-name=a.b"})...)
			if code != exitFailure || stdout != "" || !strings.Contains(stderr, tt.message) {
				t.Errorf("--print-rbac: exit code %d: %s%s", code, stdout, stderr)
			}
		})
	}
}

// TestContainerOfAWorkload: the only one that runs roles, unless --container names it; also an init container that runs as a sidecar.
func TestContainerOfAWorkload(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		name       string
		containers []corev1.Container
		want       string // its name, or the error
	}{
		"by its first argument": {"", []corev1.Container{{Name: "a", Args: []string{"all"}}, {Name: "b", Args: []string{"--x"}}}, "a"},
		"by its command":        {"", []corev1.Container{{Name: "a", Command: []string{"/csi-attacher"}}, {Name: "b"}}, "a"},
		"sections": {"", []corev1.Container{{Name: "a", Args: []string{"all", "--", "csi-attacher", "--v=$(V)"}},
			{Name: "b", Command: []string{"/storage-controller", "livenessprobe"}}}, "a"},
		"several": {"", []corev1.Container{{Name: "a", Args: []string{"attach"}}, {Name: "b", Args: []string{"resize"}}},
			"--container: must be one of a, b"},
		"one of several":                      {"b", []corev1.Container{{Name: "a", Args: []string{"attach"}}, {Name: "b"}}, "b"},
		"none":                                {"", []corev1.Container{{Name: "a"}}, "no container runs roles"},
		"an image with the name of a sidecar": {"a", []corev1.Container{{Name: "a", Image: "csi-attacher:v1"}}, "a"},
		"no such container":                   {"b", []corev1.Container{{Name: "a"}}, "has no container b"},
	}
	for name, tt := range tests {
		for _, init := range []bool{false, true} {
			w := workload{kind: "deployment"}
			if init {
				w.object.Spec.Template.Spec.InitContainers = tt.containers
			} else {
				w.object.Spec.Template.Spec.Containers = tt.containers
			}
			err := w.choose(tt.name)
			if err == nil && w.container.Name != tt.want || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s: %q, %v, want %q", name, w.container.Name, err, tt.want)
			}
		}
	}
}

// TestEndpointOfAContainer: a port with the name of an HTTP endpoint, else that of a probe.
func TestEndpointOfAContainer(t *testing.T) {
	t.Parallel()
	ports := func(names ...string) (all []corev1.ContainerPort) {
		for i, name := range names {
			all = append(all, corev1.ContainerPort{Name: name, ContainerPort: int32(i + 1)})
		}
		return all
	}
	probe := func(scheme corev1.URIScheme, port intstr.IntOrString) *corev1.Probe {
		return &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Scheme: scheme, Port: port}}}
	}
	for name, tt := range map[string]struct {
		container    corev1.Container
		scheme, port string
	}{
		"nothing":            {corev1.Container{Ports: ports("webhook")}, "", ""},
		"the first name":     {corev1.Container{Ports: ports("http", "metrics", "http-endpoint")}, "", "3"},
		"the second name":    {corev1.Container{Ports: ports("http", "metrics")}, "", "2"},
		"a name and a probe": {corev1.Container{Ports: ports("http"), LivenessProbe: probe("HTTPS", intstr.FromInt32(9))}, "", "1"},
		"a liveness probe":   {corev1.Container{LivenessProbe: probe("HTTPS", intstr.FromInt32(9))}, "https", "9"},
		"the name of a port": {corev1.Container{Ports: ports("a", "b"), ReadinessProbe: probe("", intstr.FromString("b"))}, "", "2"},
		"a probe of a command": {corev1.Container{LivenessProbe: &corev1.Probe{}, ReadinessProbe: probe("HTTP", intstr.FromInt32(9))},
			"http", "9"},
	} {
		if scheme, port := endpoint(tt.container); scheme != tt.scheme || port != tt.port {
			t.Errorf("%s: %q %q, want %q %q", name, scheme, port, tt.scheme, tt.port)
		}
	}
}
