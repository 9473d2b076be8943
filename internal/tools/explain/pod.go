// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// podClaim is a claim of the pod that is explained, with the facts about it or the error of reading it.
type podClaim struct {
	name  string
	facts *facts
	err   error
}

func (g *gatherer) gatherPod(ctx context.Context) error {
	f := g.facts
	f.pod = get(ctx, g, "pod", g.request, g.Kubernetes.CoreV1().Pods(g.request.Namespace).Get)
	if !f.pod.Found {
		return g.request.wrap(f.pod.Err)
	}
	pod := f.pod.Value
	if pod.Spec.NodeName != "" {
		g.node(ctx, pod.Spec.NodeName)
	}
	for _, key := range kube.ClaimsOfPod(pod) {
		_, name, _ := strings.Cut(key, "/")
		claim := g.about(Request{Kind: KindClaim, Namespace: pod.Namespace, Name: name})
		claim.facts.pods = apiread.Found([]*corev1.Pod{pod}) // other pods of the claim are not listed
		err := claim.gatherClaim(ctx)
		f.podClaims = append(f.podClaims, podClaim{name: name, facts: claim.facts, err: err})
	}
	g.events(ctx, pod.Namespace, string(pod.UID))
	return nil
}

// hasStarted reports whether the volumes of a pod are mounted: the kubelet starts no container before.
func hasStarted(pod *corev1.Pod) bool {
	return pod.Status.Phase != corev1.PodPending && pod.Status.Phase != "" ||
		slices.ContainsFunc(slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses),
			func(c corev1.ContainerStatus) bool { return c.ContainerID != "" })
}

func explainPod(f *facts) Report {
	e, pod := &explanation{facts: f}, f.pod.Value
	rest := "Nothing to do: no container waits for a volume."
	if !hasStarted(pod) {
		rest = "The kubelet mounts the volumes of the pod and starts its containers."
		explainStart(e)
	} else if e.node.Missing {
		e.failing("node", "Node %q of the pod not found.", pod.Spec.NodeName).
			SetNext("Run `storage-controller explain node %s`.", pod.Spec.NodeName)
	}
	if len(f.podClaims) == 0 {
		e.ok("claim", "The pod uses no PersistentVolumeClaim.")
	}
	explainPodClaims(e)
	return e.report(KindPod, pod, "The pod is "+cmp.Or(string(pod.Status.Phase), "new")+onNode(pod), rest)
}

// explainStart reports what a pod without a running container waits for, as far as scheduler and kubelet report it.
func explainStart(e *explanation) {
	pod := e.pod.Value
	switch {
	case pod.Spec.NodeName == "" && explainUnscheduled(e, pod):
	case pod.Spec.NodeName == "":
		e.waiting("node", "The pod is not scheduled.").SetNext("The scheduler selects a node for the pod.")
	case e.node.Missing:
		e.blocked("node", "Node %q of the pod not found.", pod.Spec.NodeName).
			SetNext("Delete the pod: it cannot start. Run `storage-controller explain node %s`.", pod.Spec.NodeName)
	case e.node.Found && !isReady(e.node.Value):
		e.failing("node", "Node %q of the pod is not Ready.", pod.Spec.NodeName).
			SetNext("Run `storage-controller explain node %s`.", pod.Spec.NodeName)
	}
	mounting := []string{"FailedMount", "FailedAttachVolume", "FailedMapVolume"}
	for _, event := range e.newestFirst() {
		if slices.Contains(mounting, event.Reason) {
			e.failed("mount", failureOfEvent(event, cmp.Or(event.Source.Component, event.ReportingController, componentKubelet)),
				"Last error (%s)", event.Reason)
			return
		}
	}
}

// maxClaims bounds how many claims of a pod are explained in its report.
const maxClaims = 10

// explainPodClaims adds the findings about the claims of the pod, except those that are ok.
func explainPodClaims(e *explanation) {
	var fine, more []string
	shown := map[string]bool{} // findings about a driver that is unknown, which its other claims repeat
	explained := 0
	for _, claim := range e.podClaims {
		var findings []finding.Finding
		for _, f := range claim.findings(e) {
			if f.Severity != finding.OK && !(f.Severity == finding.Unknown && shown[f.Message]) {
				findings = append(findings, f)
			}
		}
		switch {
		case len(findings) == 0:
			fine = append(fine, claim.name)
			continue
		case explained == maxClaims:
			more = append(more, claim.name)
			continue
		}
		explained++
		for _, f := range findings {
			shown[f.Message] = true
			f.Object = apiread.Name(KindClaim, e.pod.Value.Namespace, claim.name)
			e.findings = append(e.findings, f)
		}
	}
	if len(fine) > 0 {
		e.ok("claim", "Nothing is to be done for %s: %s.", finding.Plural(len(fine), "claim"), kube.ShortList(fine, maxClaims))
	}
	if len(more) > 0 {
		e.unknown("claim", "There are findings about %s: %s.", finding.Plural(len(more), "more claim"), kube.ShortList(more, maxClaims)).
			SetNext("Run `storage-controller explain pvc -n %s %s`.", e.pod.Value.Namespace, more[0])
	}
}

// findings returns the findings about the claim of a pod, and its attachment to the node of the pod.
func (c podClaim) findings(pod *explanation) []finding.Finding {
	e := &explanation{facts: c.facts}
	switch {
	case errors.Is(c.err, ErrNotFound):
		e.blocked("claim", "PersistentVolumeClaim %s/%s not found.", pod.pod.Value.Namespace, c.name).
			SetNext("Create claim %s. That of an ephemeral volume is created by kube-controller-manager.", c.name)
		return e.findings
	case c.err != nil:
		e.unknown("claim", "%s", sentence(c.err.Error()))
		return e.findings
	}
	node := pod.pod.Value.Spec.NodeName
	isForNode := func(va *storagev1.VolumeAttachment) bool { return va.Spec.NodeName == node }
	needsAttachment := node != "" && !hasStarted(pod.pod.Value) && e.driver != "" && e.volume.Found && e.attaches()
	if needsAttachment && e.attachments.Found && !slices.ContainsFunc(e.attachments.Value, isForNode) {
		e.waiting("attachment", "No VolumeAttachment of PersistentVolume %q for node %q.", e.volume.Value.Name, node).
			SetNext("kube-controller-manager creates it, for most access modes after the volume is detached from other nodes.")
	}
	report := explainClaimOfPod(e)
	if e.claim.Value.Status.Phase != corev1.ClaimBound {
		report.Findings = append(report.Findings, finding.New(finding.Waiting, "claim", report.State, report.Next))
	}
	return report.Findings
}

// maxPods bounds how many pods of a claim are reported.
const maxPods = 5

// explainPendingPods reports the pods that use a bound claim and have not started.
func explainPendingPods(e *explanation) {
	claim := e.claim.Value
	if claim.Spec.VolumeName == "" {
		return
	}
	pending := slices.DeleteFunc(e.podsUsing(), hasStarted)
	for _, p := range pending[:min(len(pending), maxPods)] {
		if p.Spec.NodeName == "" && explainUnscheduled(e, p) {
			continue
		}
		e.waiting("pod", "Pod %q, which uses the claim, has not started%s.", p.Name, onNode(p)).
			SetNext("Run `storage-controller explain pod -n %s %s`.", p.Namespace, p.Name)
	}
	if n := len(pending) - maxPods; n > 0 {
		e.waiting("pod", "%s that use the claim have not started.", finding.Plural(n, "more pod"))
	}
}

func onNode(p *corev1.Pod) string {
	if p.Spec.NodeName == "" {
		return ""
	}
	return fmt.Sprintf(" on node %q", p.Spec.NodeName)
}
