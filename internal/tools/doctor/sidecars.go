// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

// program is the image name of this program. A pod with it and a sidecar uses both for one driver.
const program = "storage-controller"

const sidecarsCheck = "sidecars"

// checkSidecars searches the namespace for sidecars that the roles replace.
func (e *examination) checkSidecars(ctx context.Context) {
	query := apiread.Query{Topic: sidecarsCheck, What: "Pods in namespace " + e.plan.PodNamespace, Effect: onlyThisCommand}
	pods := apiread.List[*corev1.Pod](ctx, e.reader, query, e.Kubernetes.CoreV1().Pods(e.plan.PodNamespace).List)
	e.checkIdentity(pods.Value)
	if !pods.Found {
		return
	}
	var found []finding.Finding
	for _, pod := range pods.Value {
		found = append(found, e.plan.sidecarsOf(pod)...)
	}
	if found == nil {
		e.ok(sidecarsCheck, "none in namespace %s (pods: %d)", e.plan.PodNamespace, len(pods.Value))
		return
	}
	e.Findings = append(e.Findings, found...)
}

// checkIdentity warns about a process that the name of its host identifies, unless one of pods has that name and a host name of its own.
func (e *examination) checkIdentity(pods []*corev1.Pod) {
	elected := slices.ContainsFunc(e.plan.Roles, func(r Role) bool { return r.Elected })
	hasOwnName := slices.ContainsFunc(pods, func(pod *corev1.Pod) bool { return pod.Name == e.plan.Host && !pod.Spec.HostNetwork })
	if elected && e.plan.Host != "" && !hasOwnName {
		e.add("environment", finding.Warning, "set POD_NAME from metadata.name",
			"POD_NAME is not set: the host name %s identifies a replica, but pods with hostNetwork on the same node share it", e.plan.Host)
	}
}

// sidecarsOf returns a check for each container of pod that does the work of a role.
func (p Plan) sidecarsOf(pod *corev1.Pod) []finding.Finding {
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return nil
	}
	var found []finding.Finding
	containers := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
	samePod := pod.Name == p.Pod ||
		slices.ContainsFunc(containers, func(c corev1.Container) bool { return migrate.ImageName(c.Image) == program })
	for _, c := range containers {
		i := slices.IndexFunc(p.Roles, func(r Role) bool { return r.Sidecar != "" && slices.Contains(programs(c), r.Sidecar) })
		if i < 0 {
			continue
		}
		role := p.Roles[i]
		shared := elects(c, role.Sidecar) && role.Elected && (role.Sidecar != topolvm || role.sharesLease(pod, c))
		effect := "only one of them is active, because they share a Lease"
		switch {
		case !shared:
			effect = "both are active, because they do not share a Lease"
		case samePod && role.Sidecar != topolvm: // the identity of a sidecar is the name of its pod, too
			effect = "both are active, because in one pod both hold the Lease"
		}
		severity, next := finding.Warning, "if it serves the same driver, remove it"
		if samePod {
			severity, next = finding.Failing, "remove it, because "+program+" runs in the same pod"
		}
		message := fmt.Sprintf("container %s of pod %s runs %s, which does the work of role %s", c.Name, pod.Name, role.Sidecar, role.Name)
		found = append(found, finding.New(severity, sidecarsCheck, message, next+". Until then "+effect))
	}
	return found
}

// The controller of TopoLVM holds its Lease unless leader election is disabled.
const (
	topolvm      = "topolvm-controller"
	topolvmLease = "topolvm"
)

// programs returns the programs that c may run. An image may have the name of its only program,
// or contain several.
func programs(c corev1.Container) []string {
	image := migrate.ImageName(c.Image)
	if image == program { // also under the name of a sidecar
		return nil
	}
	if len(c.Command) > 0 {
		return []string{image, path.Base(c.Command[0])}
	}
	return []string{image, migrate.Sidecar(c.Name, c.Image, c.Args)}
}

// sharesLease reports whether topolvm-controller in container c uses the Lease of r.
func (r Role) sharesLease(pod *corev1.Pod, c corev1.Container) bool {
	lease, namespace := topolvmLease, pod.Namespace
	args := slices.Concat(c.Command, c.Args)
	for i, arg := range args {
		name, value, given := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if !given && i+1 < len(args) {
			value = args[i+1]
		}
		switch {
		case strings.Contains(value, "$("): // of an environment variable, such as the namespace of the pod
		case name == "leader-election-id":
			lease = value
		case name == "leader-election-namespace":
			namespace = value
		}
	}
	return r.Lease == lease && r.LeaseNamespace == namespace
}

// elects reports whether a sidecar uses leader election. It is the default of topolvm-controller.
func elects(c corev1.Container, sidecar string) bool {
	on := sidecar == topolvm
	for _, arg := range slices.Concat(c.Command, c.Args) {
		name, value, given := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if strings.HasPrefix(arg, "-") && (name == "leader-election" || name == "enable-leader-election" || name == "leader-elect") {
			on = !given || value == "true" || value == "1"
		}
	}
	return on
}
