// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// othersInterval is the time between two checks of a Node that is being deleted.
const othersInterval = 10 * time.Second

// waiting returns the Nodes of a host that are being deleted and have our finalizer, unless the mode is off.
func (p Policy) waiting(h host) []*corev1.Node {
	if p.NodeFinalizerMode == FinalizerOff {
		return nil
	}
	return h.waiting(p.NodeFinalizer)
}

// waiting returns the Nodes of a host that are being deleted and have a finalizer.
func (h host) waiting(finalizer string) []*corev1.Node {
	return slices.DeleteFunc(slices.Clone(h.nodes), func(n *corev1.Node) bool {
		return n.DeletionTimestamp == nil || !slices.Contains(n.Finalizers, finalizer)
	})
}

// end returns the time at which our finalizer is removed from the Nodes of a host in any case, and
// false if they do not have it.
func (p Policy) end(h host) (time.Time, bool) {
	nodes := p.waiting(h)
	if len(nodes) == 0 {
		return time.Time{}, false
	}
	first := slices.MinFunc(nodes, func(a, b *corev1.Node) int { return a.DeletionTimestamp.Compare(b.DeletionTimestamp.Time) })
	return first.DeletionTimestamp.Add(p.NodeFinalizerTimeout), true
}

// isOther reports whether f is the finalizer of another component.
func (p Policy) isOther(f string) bool { return f != p.NodeFinalizer }

// idle returns why nothing is deleted while a Node waits for our finalizer, or "".
func (p Policy) idle(h host, c cluster) string {
	switch {
	case p.SkipNodeFinalize:
		return "--skip-node-finalize is set"
	case !p.Deletes():
		return "the mode of the cleanup is " + string(p.NodeCleanup)
	case h.record.OptedOut:
		return cmp.Or(optOut(p.annotation, h.nodes...), "the Node had opted out")
	case c.keyProblem != "":
		return "TopologyKeyUnknown: " + c.keyProblem + ". Set --topology-node-key"
	}
	return ""
}

// decideDeleting is for a host whose Nodes are being deleted, all or some of them. Our finalizer holds these for no
// longer than the timeout. While another Node may have the volumes, nothing is cleaned up, and there is no record.
func (p Policy) decideDeleting(h host, c cluster, cleaned bool) hostStep {
	st := hostStep{action: hostNothing}
	if h.state == deleting {
		st.state = stateTerminating
	}
	end, ours := p.end(h)
	if !ours {
		return st
	}
	wait := func(until time.Time) hostStep {
		st.next = earliest(until, end)
		return st
	}
	node := p.waiting(h)[0]
	grace := node.DeletionTimestamp.Add(p.NodeDeleteGrace)
	others := slices.ContainsFunc(node.Finalizers, p.isOther)
	switch why := p.idle(h, c); {
	case why != "" && (h.state == deleting || p.SkipNodeFinalize || p.NodeCleanup == ModeOff):
		return hostStep{action: hostRelease, reason: reasonSkipped, message: "The claims of the node are kept: " + why}
	case !c.now.Before(end):
		return p.timedOut()
	case h.state != deleting:
		return wait(end)
	case p.NodeFinalizerWaitForOthers && others && isReady(node):
		return wait(c.now.Add(othersInterval))
	case c.now.Before(grace):
		return wait(grace)
	case h.record.Held != "":
		return hostStep{action: hostRelease, reason: reasonSkipped, message: "Finalizer removed: too many nodes are lost. " +
			"The cleanup of the claims waits for an approval: " + p.approveCommand(h)}
	case !cleaned:
		return hostStep{action: hostClean}
	}
	return hostStep{action: hostRelease}
}

// approveCommand returns the command that approves the cleanup of a host.
func (p Policy) approveCommand(h host) string {
	return fmt.Sprintf("storage-controller nodecontroller approve --driver-name=%s %s --yes", p.driver, h.name())
}

// timedOut returns the step for Nodes whose deletion was requested --node-finalizer-timeout ago.
func (p Policy) timedOut() hostStep {
	return hostStep{action: hostRelease, reason: reasonTimeout, message: fmt.Sprintf(
		"Finalizer removed after %v, before the cleanup was complete. The cleanup continues after --node-missing-grace",
		p.NodeFinalizerTimeout)}
}

// release removes our finalizer from the Nodes of h that are being deleted. again: a Node has opted out and the record
// does not contain that yet; its finalizer stays until the record does.
func (t *term) release(ctx context.Context, h host, st hostStep) (again bool, err error) {
	key, _ := t.c.index.topologyKey()
	for _, node := range t.policy.waiting(h) {
		if t.policy.NodeCleanup != ModeOff && hostOf(node, key) != h.value {
			continue // h.value is a further name of the Node, whose record belongs to hostOf(node)
		}
		live, exists, err := t.nodes.Refetch(ctx, t.c.deps.Client.CoreV1().Nodes(), node)
		switch {
		case err != nil:
			return false, fmt.Errorf("reading Node %q before its finalizer is removed: %w", node.Name, err)
		case !exists:
			continue
		case optOut(t.policy.annotation, live) != "" && (!h.record.OptedOut || h.record.Unparsable) &&
			t.policy.NodeCleanup != ModeOff && h.state == deleting: // otherwise there is no record
			again = true
			continue
		}
		node = live
		change := kube.MetadataPatch{RemoveFinalizers: []string{t.policy.NodeFinalizer}}
		var consent any // as it was read: the owner may opt out meanwhile
		if value, ok := live.Annotations[t.policy.annotation]; ok {
			consent = value
		}
		change.Tests = map[string]any{kube.AnnotationPath(t.policy.annotation): consent}
		if err := t.patchNode(ctx, node, change); err != nil {
			return false, err
		}
		if st.reason != "" {
			t.c.notify.warn(node, st.reason, "%s", st.message)
		}
		t.c.metrics.held(node.DeletionTimestamp.Time)
		klog.FromContext(ctx).Info("Finalizer removed from Node", "node", node.Name, "reason", st.reason, "message", st.message)
	}
	return again, nil
}

// protect adds our finalizer to the Nodes of a host that have the driver, in mode manage. Nothing removes it from a Node that is
// not being deleted.
func (t *term) protect(ctx context.Context, h host) error {
	for _, node := range h.nodes {
		if !t.c.unprotected(node) {
			continue
		}
		err := t.patchNode(ctx, node, kube.MetadataPatch{AddFinalizers: []string{t.policy.NodeFinalizer}})
		if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) { // the cache may be outdated
			if live, e := t.live.node(ctx, node.Name); e == nil && (live == nil || live.DeletionTimestamp != nil) {
				err = nil // decideDeleting handles it
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// patchNode writes our finalizer.
func (t *term) patchNode(ctx context.Context, node *corev1.Node, change kube.MetadataPatch) error {
	ctx, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	_, err := t.nodes.Patch(ctx, t.c.deps.Client.CoreV1().Nodes(), node, change)
	if err != nil {
		return fmt.Errorf("patching finalizer %s of Node %q: %w", t.policy.NodeFinalizer, node.Name, err)
	}
	return nil
}

// earliest returns the earlier of two times. Zero means never.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
