// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
)

// processCheck is the name of the check of a process.
const processCheck = "process"

// processes is what running processes report about themselves.
type processes struct {
	checks      []finding.Finding   // a check of each process
	plan        *doctor.Plan        // of the first one that answered; nil: none
	permissions *doctor.Permissions // for plan; nil: not requested
}

// add adds the status page of the process that name describes.
func (p *processes) add(name string, page statusz.Page) {
	started := fmt.Sprintf("%s: version %s, started at %s", name, page.Version, page.Started.Format(time.RFC3339))
	c := finding.New(finding.OK, processCheck, started, "")
	for _, failed := range page.Checks {
		if failed.Error != "" {
			c.Severity, c.Message = finding.Warning, c.Message+"; "+failed.Kind+" "+failed.Name+": "+failed.Error
			c.Next = "correct the cause; the log of the process has details"
		}
	}
	p.checks = append(p.checks, c)
	for _, r := range page.Roles {
		if r.Disabled != "" {
			p.checks = append(p.checks, doctor.DisabledRole(r.Name, name+": disabled: "+r.Disabled))
		}
	}
	if p.plan == nil {
		p.plan, p.permissions = page.Plan, page.Permissions
		return
	}
	for _, c := range page.Plan.Findings {
		if !slices.Contains(p.plan.Findings, c) {
			c.Message += " (" + name + ")"
			p.plan.Findings = append(p.plan.Findings, c)
		}
	}
}

// askURL returns what the process reports whose status page s names.
func (s statusFlags) askURL(ctx context.Context, user *rest.Config, permissions bool) (processes, error) {
	client, err := statusz.NewClient(user, s.url, s.access)
	if err != nil {
		return processes{}, err
	}
	page, err := statusz.Read(ctx, client, s.url, permissions)
	if err != nil {
		return processes{}, fmt.Errorf("reading the status page at %s: %w", s.url, err)
	}
	var p processes
	p.add(s.url, page)
	return p, nil
}

// workloadResources maps the names of kinds on the command line to their resources.
var workloadResources = map[string]string{
	"deployment": "deployments", "deployments": "deployments", "deploy": "deployments",
	"statefulset": "statefulsets", "statefulsets": "statefulsets", "sts": "statefulsets",
	"daemonset": "daemonsets", "daemonsets": "daemonsets", "ds": "daemonsets",
}

// checkWorkload returns an error unless object is KIND/NAME of a workload.
func checkWorkload(object string) error {
	kind, name, _ := strings.Cut(object, "/")
	if name == "" || strings.Contains(name, "/") || workloadResources[strings.ToLower(kind)] == "" {
		return &usageError{fmt.Errorf("%q: must be deployment/NAME, statefulset/NAME or daemonset/NAME", object)}
	}
	return nil
}

// workload is a Deployment, StatefulSet or DaemonSet whose processes doctor asks.
type workload struct {
	client    kubernetes.Interface
	object    appsv1.Deployment // the other kinds have the fields that are read here, too
	kind      string
	container corev1.Container
}

// readWorkload reads the workload that reference names as KIND/NAME. container is the name of the container; "" is the only one that
// runs roles.
func readWorkload(ctx context.Context, cfg *rest.Config, namespace, reference, container string) (workload, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.Timeout = statusz.ReviewTimeout
	kind, name, _ := strings.Cut(reference, "/")
	w := workload{kind: strings.TrimSuffix(workloadResources[strings.ToLower(kind)], "s")}
	clients, err := apiread.NewClients(cfg)
	if err != nil {
		return w, fmt.Errorf("creating the clients: %w", err)
	}
	objects := clients.Dynamic.Resource(appsv1.SchemeGroupVersion.WithResource(w.kind + "s")).Namespace(namespace)
	object, err := apiread.Typed[appsv1.Deployment](objects)(ctx, name, metav1.GetOptions{})
	if err != nil {
		return w, fmt.Errorf("reading %s/%s in namespace %s: %w", w.kind, name, namespace, err)
	}
	w.client, w.object = clients.Kubernetes, *object
	err = w.choose(container)
	return w, err
}

// choose chooses the container called name, or without a name the only one that runs roles, as far as its command shows that.
func (w *workload) choose(name string) error {
	var found []string
	spec := w.object.Spec.Template.Spec
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		argv := slices.Concat(c.Command, c.Args)
		if len(c.Command) == 0 {
			argv = slices.Insert(argv, 0, programName)
		}
		if command, _, _ := findCommand(argv); c.Name == name || name == "" && command != nil {
			found, w.container = append(found, c.Name), c
		}
	}
	switch {
	case len(found) == 0 && name != "":
		return fmt.Errorf("%s has no container %s", w, name)
	case len(found) == 0:
		return fmt.Errorf("%s: no container runs roles of storage-controller, as far as its command shows it. Set --container", w)
	case len(found) > 1:
		return &usageError{fmt.Errorf("--container: must be one of %s, which run roles", strings.Join(found, ", "))}
	}
	return nil
}

func (w *workload) String() string {
	return fmt.Sprintf("%s/%s in namespace %s", w.kind, w.object.Name, w.object.Namespace)
}

// account returns the user name of the ServiceAccount of w.
func (w *workload) account() string {
	return serviceAccount(w.object.Namespace + "/" + cmp.Or(w.object.Spec.Template.Spec.ServiceAccountName, "default"))
}

// maxPages bounds the status pages that are read: those of a DaemonSet with many pods are alike.
const maxPages = 20

// ask returns what the processes of w report, and a failed check for each that does not answer. The first one that answers also
// reviews its permissions, if they are requested: all have the same ServiceAccount.
func (w *workload) ask(ctx context.Context, permissions bool) (processes, error) {
	selector := metav1.FormatLabelSelector(w.object.Spec.Selector)
	pods, err := kube.ListAll[*corev1.Pod](ctx, func(ctx context.Context, o metav1.ListOptions) (*corev1.PodList, error) {
		o.LabelSelector = selector
		return w.client.CoreV1().Pods(w.object.Namespace).List(ctx, o)
	})
	if err != nil {
		return processes{}, fmt.Errorf("listing the pods of %s: %w", w, err)
	}
	pods = slices.DeleteFunc(pods, func(p *corev1.Pod) bool {
		return p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
	})
	var p processes
	if len(pods) == 0 {
		p.checks = []finding.Finding{w.withoutPod()}
	}
	running := 0
	for _, pod := range pods {
		reason, hint := w.notRunning(pod)
		if reason == "" {
			running++
			if running > maxPages {
				continue
			}
			page, err := w.read(ctx, pod, permissions && p.plan == nil)
			if err == nil {
				p.add("pod "+pod.Name, page)
				continue
			}
			reason, hint = pageError(err), w.otherWays(pod.Name, err)
		}
		p.checks = append(p.checks, finding.New(finding.Failing, processCheck, "pod "+pod.Name+": "+reason, hint))
	}
	if running > maxPages {
		message := fmt.Sprintf("the container runs in %d pods, of which the first %d were asked", running, maxPages)
		p.checks = append(p.checks, finding.New(finding.Unknown, processCheck, message, ""))
	}
	return p, nil
}

// withoutPod returns the check of a workload without a pod, with its conditions.
func (w *workload) withoutPod() finding.Finding {
	message := w.String() + " has no pod"
	if ptr.Deref(w.object.Spec.Replicas, 1) == 0 {
		message += ": its replicas are 0"
	}
	for _, c := range w.object.Status.Conditions {
		message += fmt.Sprintf("; %s=%s (%s): %s", c.Type, c.Status, c.Reason, c.Message)
	}
	return finding.New(finding.Failing, processCheck, message,
		fmt.Sprintf("correct the cause: kubectl describe -n %s %s/%s", w.object.Namespace, w.kind, w.object.Name))
}

// notRunning returns why the container in pod does not run, and what to do; "" if it runs.
func (w *workload) notRunning(pod *corev1.Pod) (reason, hint string) {
	hint = fmt.Sprintf("correct the cause: kubectl describe -n %s pod/%s", pod.Namespace, pod.Name)
	statuses := slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses)
	i := slices.IndexFunc(statuses, func(s corev1.ContainerStatus) bool { return s.Name == w.container.Name })
	if i < 0 {
		reason = "is " + cmp.Or(string(pod.Status.Phase), string(corev1.PodPending))
		for _, c := range pod.Status.Conditions {
			if c.Status != corev1.ConditionTrue {
				reason += fmt.Sprintf("; %s=%s (%s): %s", c.Type, c.Status, c.Reason, c.Message)
			}
		}
		return reason, hint
	}
	s := statuses[i]
	ended := s.State.Terminated
	switch {
	case s.State.Running != nil:
		return "", ""
	case s.State.Waiting != nil:
		reason = fmt.Sprintf("container %s waits: %s", s.Name, s.State.Waiting.Reason)
		if s.State.Waiting.Message != "" {
			reason += ": " + s.State.Waiting.Message
		}
		ended = s.LastTerminationState.Terminated
	default:
		reason = fmt.Sprintf("container %s does not run", s.Name)
	}
	if ended != nil {
		reason += fmt.Sprintf("; it exited with code %d (%s): %s", ended.ExitCode, ended.Reason, strings.TrimSpace(ended.Message))
		hint = fmt.Sprintf("correct the cause: kubectl logs -n %s %s -c %s --previous", pod.Namespace, pod.Name, s.Name)
	}
	return strings.ReplaceAll(reason, "\n", "; "), hint
}

var errNoPort = errors.New("the container has neither a port called http-endpoint, metrics or http, nor a probe over HTTP")

// read reads the status page of the process in pod through the API server.
func (w *workload) read(ctx context.Context, pod *corev1.Pod, permissions bool) (statusz.Page, error) {
	scheme, port := endpoint(w.container)
	if port == "" {
		return statusz.Page{}, errNoPort
	}
	request := w.client.CoreV1().RESTClient().Get().Namespace(pod.Namespace).Resource("pods").SubResource("proxy").
		Name(net.JoinSchemeNamePort(scheme, pod.Name, port)).Suffix("statusz").Param("format", "json")
	timeout := statusz.RequestTimeout
	if permissions {
		request.Param("permissions", "1")
		timeout = statusz.ReviewTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	body, err := request.Stream(ctx) // Decode limits what a container can send
	if err != nil {
		return statusz.Page{}, err
	}
	defer body.Close()
	return statusz.Decode(body)
}

// endpoint returns the scheme and port of the HTTP endpoint of c: a port with a name of it, else that of a probe; "" for none.
func endpoint(c corev1.Container) (scheme, port string) {
	numbers := map[string]string{}
	for _, p := range c.Ports {
		numbers[p.Name] = strconv.Itoa(int(p.ContainerPort))
	}
	if port := cmp.Or(numbers["http-endpoint"], numbers["metrics"], numbers["http"]); port != "" {
		return "", port
	}
	for _, probe := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe} {
		if probe != nil && probe.HTTPGet != nil {
			port := probe.HTTPGet.Port.String()
			return strings.ToLower(string(probe.HTTPGet.Scheme)), cmp.Or(numbers[port], port)
		}
	}
	return "", ""
}

// pageError returns the text of err with the body of a response that is none of the API server.
func pageError(err error) string {
	var status apierrors.APIStatus
	if errors.As(err, &status) && status.Status().Details != nil {
		for _, cause := range status.Status().Details.Causes {
			if cause.Type == metav1.CauseTypeUnexpectedServerResponse {
				return fmt.Sprintf("the status page: HTTP status %d: %s", status.Status().Code, strings.TrimSpace(cause.Message))
			}
		}
	}
	return "the status page: " + err.Error()
}

// otherWays returns the commands that examine the process in a pod whose status page cannot be read because of err.
func (w *workload) otherWays(pod string, err error) string {
	exec := fmt.Sprintf("kubectl exec -n %s %s -c %s -- /storage-controller doctor", w.object.Namespace, pod, w.container.Name)
	_, port := endpoint(w.container)
	if port == "" {
		return "run " + exec
	}
	url := "http://127.0.0.1:" + port
	if apierrors.IsUnauthorized(err) || strings.Contains(pageError(err), "HTTP request to an HTTPS server") { // --secure-metrics-server
		url = "https://127.0.0.1:" + port + " --status-insecure-skip-tls-verify"
	}
	forward := fmt.Sprintf("kubectl port-forward -n %s pod/%s %s", w.object.Namespace, pod, port)
	return "run " + exec + "; or " + forward + ", and storage-controller doctor --status-url=" + url
}
