// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
)

// newCluster is a cluster whose volumes are each on one node, and may be cleaned up after it.
func newCluster(t *testing.T, nodes int, attach bool) *local {
	t.Helper()
	l := newLocal(t, nodes, attach)
	_, err := l.client.StorageV1().StorageClasses().Patch(t.Context(), l.class, types.MergePatchType,
		l.annotation("node-cleanup", "enabled"), metav1.PatchOptions{})
	l.must(err)
	t.Cleanup(func() { // without the nodecontroller the finalizer keeps deleted nodes
		for _, n := range l.nodes {
			_, _ = l.client.CoreV1().Nodes().Patch(context.Background(), n, types.MergePatchType,
				[]byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		}
	})
	return l
}

// name is that of an annotation or finalizer of the driver.
func (l *local) name(suffix string) string { return l.plugin.Name() + "/" + suffix }

// annotation is a patch that sets one of the driver.
func (l *local) annotation(suffix, value string) []byte {
	return fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, l.name(suffix), value)
}

// keep runs all roles, with a clean-up.
func (l *local) keep(mode string, args ...string) *process {
	l.t.Helper()
	return l.publish("all", slices.Concat(quick, election, []string{"--node-cleanup=" + mode, "--http-endpoint=127.0.0.1:0"}, args)...)
}

// lose removes nodes for good. Their CSINodes belong to them and are collected as garbage
// elsewhere.
func (e *env) lose(nodes ...string) {
	e.t.Helper()
	for _, n := range nodes {
		e.must(e.client.CoreV1().Nodes().Delete(e.t.Context(), n, metav1.DeleteOptions{}))
	}
	for _, n := range nodes {
		e.must(e.client.StorageV1().CSINodes().Delete(e.t.Context(), n, metav1.DeleteOptions{}))
	}
}

func (l *local) pv(ctx context.Context, name string) (*corev1.PersistentVolume, error) {
	return l.client.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
}

func (l *local) pvc(ctx context.Context, name string) (*corev1.PersistentVolumeClaim, error) {
	return l.client.CoreV1().PersistentVolumeClaims(l.ns).Get(ctx, name, metav1.GetOptions{})
}

// records returns the records of lost nodes, by the values of the topology key, which are node names here.
func (e *env) records(ctx context.Context) (map[string]nodecleanup.LostNode, error) {
	all := map[string]nodecleanup.LostNode{}
	cm, err := e.client.CoreV1().ConfigMaps(e.ns).Get(ctx, nodecleanup.ConfigMapName(e.plugin.Name()), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return all, nil
	}
	for _, n := range nodecleanup.ParseLostNodes(cm) {
		all[n.Value] = n
	}
	return all, err
}

// recorded waits until check accepts the record of a node; nil means that there is none.
func (e *env) recorded(node, what string, check func(n *nodecleanup.LostNode) bool) (found nodecleanup.LostNode) {
	e.t.Helper()
	e.eventually("the record of node "+node+" "+what, func(ctx context.Context) error {
		all, err := e.records(ctx)
		if err != nil {
			return err
		}
		n, ok := all[node]
		if found = n; !ok && !check(nil) || ok && !check(&n) {
			return fmt.Errorf("the records are %+v", all)
		}
		return nil
	})
	return found
}

// missing waits until the API server has confirmed that nodes do not exist.
func (e *env) missing(nodes ...string) {
	e.t.Helper()
	for _, node := range nodes {
		e.recorded(node, "has a clock", func(n *nodecleanup.LostNode) bool { return n != nil && !n.Since.IsZero() })
	}
}

// held waits until the breaker holds nodes, or does not.
func (e *env) held(want bool, nodes ...string) {
	e.t.Helper()
	for _, node := range nodes {
		e.recorded(node, fmt.Sprintf("is held: %t", want), func(n *nodecleanup.LostNode) bool { return (n != nil && n.Held != "") == want })
	}
}

// shortest is the shortest grace that may be set.
const shortest = "--node-missing-grace=1m"

// age waits until the shortest grace of a node has ended.
func (e *env) age(node string) {
	e.t.Helper()
	e.recorded(node, "is older than the grace", func(n *nodecleanup.LostNode) bool {
		return n != nil && !n.Since.IsZero() && time.Since(n.Since) > time.Minute
	})
}

// approve lets the administrator approve the clean-up of nodes, which needs no grace then.
func (e *env) approve(ctx context.Context, nodes ...string) error {
	_, err := e.client.CoreV1().ConfigMaps(e.ns).Patch(ctx, nodecleanup.ConfigMapName(e.plugin.Name()), types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, nodecleanup.AnnotationApprove, strings.Join(nodes, ",")),
		metav1.PatchOptions{})
	return err
}

// told waits for an event about a cluster-wide object.
func (l *local) told(object, reason, text string) {
	l.t.Helper()
	l.eventually(reason+" is told of "+object, func(ctx context.Context) error {
		events, err := l.client.CoreV1().Events(metav1.NamespaceDefault).List(ctx,
			metav1.ListOptions{FieldSelector: "involvedObject.name=" + object + ",reason=" + reason})
		if err != nil {
			return err
		}
		for _, e := range events.Items {
			if strings.Contains(e.Message, text) {
				return nil
			}
		}
		return fmt.Errorf("%d other events", len(events.Items))
	})
}

// judged waits until p has checked a lost node again, as it does after a change of a volume there.
func (l *local) judged(p *process, node, volume string) {
	l.t.Helper()
	looks := func() (n int) {
		for line := range strings.SplitSeq(p.logged(), "\n") {
			if strings.Contains(line, "Decided") && strings.Contains(line, node) {
				n++
			}
		}
		return n
	}
	before := looks()
	_, err := l.client.CoreV1().PersistentVolumes().Patch(l.t.Context(), volume, types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"labels":{"look":"%d"}}}`, before), metav1.PatchOptions{})
	l.must(err)
	l.eventually("node "+node+" is checked again", func(context.Context) error {
		if looks() == before {
			return errors.New("it is not")
		}
		return nil
	})
}

// done is what the nodecontroller has changed since mark, in order, as far as it is about
// objects with these names; the map tells how to call them.
func (l *local) done(mark int64, names map[string]string) []string {
	l.t.Helper()
	records, err := l.cp.AuditSince(mark, "storage-controller/")
	l.must(err)
	var writes []string
	for _, r := range records {
		name, mine := names[r.Object.Name]
		ours := strings.HasSuffix(r.UserAgent, "(nodecontroller)") && (r.Object.Namespace == "" || r.Object.Namespace == l.ns)
		if mine && ours && r.IsWrite() && r.Status.Code < 300 {
			writes = append(writes, strings.Join([]string{r.Verb, r.Resource(), name}, " "))
		}
	}
	return writes
}

// deletions is the part of done that destroys.
func (l *local) deletions(mark int64, names map[string]string) []string {
	l.t.Helper()
	deleted := slices.DeleteFunc(l.done(mark, names), func(w string) bool { return !strings.HasPrefix(w, "delete") })
	slices.Sort(deleted)
	return deleted
}

func (l *local) expect(got, want []string) {
	l.t.Helper()
	if !slices.Equal(got, want) {
		l.t.Errorf("the nodecontroller did\n%q, want\n%q", got, want)
	}
}

// replica is a pod of the StatefulSet of a story, with its volume.
type replica struct {
	claim, volume, node string
	pod, uid            types.UID
}

// replicas is those of "web" that run, by their claims.
func (l *local) replicas(n int) map[string]replica {
	l.t.Helper()
	l.running("web", n)
	all := map[string]replica{}
	for i := range n {
		pod, err := l.client.CoreV1().Pods(l.ns).Get(l.t.Context(), fmt.Sprintf("web-%d", i), metav1.GetOptions{})
		l.must(err)
		claim, err := l.pvc(l.t.Context(), "data-"+pod.Name)
		l.must(err)
		all[claim.Name] = replica{claim: claim.Name, volume: claim.Spec.VolumeName, node: pod.Spec.NodeName, pod: pod.UID, uid: claim.UID}
	}
	return all
}

// collected waits until Kubernetes has removed a pod whose node was deleted, which it does
// after a minute or so.
func (l *local) collected(r replica) {
	l.t.Helper()
	name := strings.TrimPrefix(r.claim, "data-")
	l.eventually("the pod of a deleted node is removed", func(ctx context.Context) error {
		pod, err := l.client.CoreV1().Pods(l.ns).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) || err == nil && pod.UID != r.pod {
			return nil
		}
		return errors.Join(err, fmt.Errorf("%s is there", name))
	})
}

// unmounted has Kubernetes know that nothing is mounted on a node: it believes that of what
// it has attached until the node says something, and then waits for minutes to detach it.
func (l *local) unmounted(node string, replicas map[string]replica) {
	l.t.Helper()
	volumes := 0
	for _, r := range replicas {
		if r.node == node {
			volumes++
		}
	}
	l.eventually("the attach-detach controller knows the attachments of "+node, func(ctx context.Context) error {
		n, err := l.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err == nil && len(n.Status.VolumesAttached) != volumes {
			err = fmt.Errorf("%d of %d volumes", len(n.Status.VolumesAttached), volumes)
		}
		return err
	})
	_, err := l.client.CoreV1().Nodes().Patch(l.t.Context(), node, types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"said":"something"}}}`), metav1.PatchOptions{})
	l.must(err)
}

// dying makes the driver fail to delete volumes of a node, as one that runs there would.
func (l *local) dying(node string) {
	l.plugin.Always("DeleteVolume", func(_ context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
		id := request.(*csi.DeleteVolumeRequest).VolumeId
		if slices.ContainsFunc(p.Volumes(), func(v csitest.Volume) bool { return v.ID == id && v.Segment[l.key()] == node }) {
			return nil, status.Error(codes.Unavailable, "no process answers on the node of the volume")
		}
		return do()
	})
}

// TestNodeIsLost has a StatefulSet run again, with new volumes, after its node was deleted.
func TestNodeIsLost(t *testing.T) {
	t.Parallel()
	// The volumes are removed while pods run again that use claims of the same names.
	for mode, args := range map[string][]string{"claims": {shortest}, "volumes": {shortest, "--pv-release-grace=10s"}} {
		t.Run(mode, func(t *testing.T) {
			l := newCluster(t, 3, true)
			l.kubelets()
			l.keep(mode, args...)
			l.published("2Gi", "2Gi", "2Gi")
			l.statefulSet("web", l.class, 3)
			before := l.replicas(3)
			node := before["data-web-0"].node
			if mode == "volumes" {
				l.dying(node)
			}
			l.unmounted(node, before)
			mark := l.mark()
			l.lose(node)

			names, want := map[string]string{}, []string(nil)
			var lost []replica
			for _, r := range before {
				names[r.claim], names[r.volume] = r.claim, "of "+r.claim
				if r.node == node {
					lost = append(lost, r)
				}
			}
			for _, r := range lost {
				l.missing(node)
				l.told(r.volume, "NodeMissing", node)
				l.expect(l.deletions(mark, names), nil)
			}
			for _, r := range lost {
				l.age(node)
				l.told(r.volume, "NodeVolumeClaimDeleted", node)
				want = append(want, "delete persistentvolumeclaims "+r.claim)
			}
			for _, r := range lost {
				l.collected(r)
			}
			after := l.replicas(3)
			for claim, was := range before {
				is := after[claim]
				if gone := was.node == node; gone == (is.uid == was.uid) || gone == (is.volume == was.volume) || is.node == node {
					t.Errorf("%s was %+v, is %+v", claim, was, is)
				}
			}
			if mode == "claims" {
				l.agrees(3) // the driver has deleted the volumes of the lost node
			} else {
				for _, r := range lost {
					l.eventually("the volume of the lost node is removed", func(ctx context.Context) error {
						pv, err := l.pv(ctx, r.volume)
						if apierrors.IsNotFound(err) {
							return nil
						}
						return errors.Join(err, fmt.Errorf("it is %s, with %v", pv.Status.Phase, pv.Finalizers))
					})
					l.told(r.volume, "NodeVolumeForceRemoved", node)
					want = append(want, "delete persistentvolumes of "+r.claim)
				}
				if n := len(l.plugin.Volumes()); n != 3+len(lost) {
					t.Errorf("the driver has %d volumes, want 3 and %d that the driver could not delete", n, len(lost))
				}
			}
			slices.Sort(want)
			l.expect(l.deletions(mark, names), want)
		})
	}
}

// spread makes one pod per node, with a volume there, and returns the volumes.
func (l *local) spread() (volumes []string, names map[string]string) {
	l.t.Helper()
	names = map[string]string{}
	for i, node := range l.nodes {
		name := fmt.Sprintf("p%d", i)
		l.pod(name, "1Gi", node)
		l.lands(name, node)
		volume := l.bound(name)
		volumes = append(volumes, volume)
		names[name], names[volume], names[node] = name, "of "+name, fmt.Sprintf("node %d", i)
	}
	return volumes, names
}

// unregistered has the driver gone from nodes, as it is while it restarts there.
func (l *local) unregistered(nodes ...int) {
	l.t.Helper()
	for _, i := range nodes {
		_, err := l.client.StorageV1().CSINodes().Patch(l.t.Context(), l.nodes[i], types.MergePatchType, []byte(`{"spec":{"drivers":[]}}`),
			metav1.PatchOptions{})
		l.must(err)
	}
}

// registered has it come back.
func (l *local) registered(nodes ...int) {
	l.t.Helper()
	for _, i := range nodes {
		drivers := fmt.Appendf(nil, `{"spec":{"drivers":[{"name":%q,"nodeID":"id-%d","topologyKeys":[%q]}]}}`, l.plugin.Name(), i, l.key())
		_, err := l.client.StorageV1().CSINodes().Patch(l.t.Context(), l.nodes[i], types.MergePatchType, drivers, metav1.PatchOptions{})
		l.must(err)
	}
}

// terminating waits until a claim is being deleted: its pod keeps it until that is removed.
func (l *local) terminating(claim string) {
	l.t.Helper()
	l.eventually("claim "+claim+" is deleted", func(ctx context.Context) error {
		c, err := l.pvc(ctx, claim)
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err == nil && c.DeletionTimestamp == nil {
			err = errors.New("it is not")
		}
		return err
	})
}

// TestHalfOfTheNodesAreLost deletes nothing before an approval.
func TestHalfOfTheNodesAreLost(t *testing.T) {
	l := newCluster(t, 4, false)
	p := l.keep("claims", shortest)
	l.published("2Gi", "2Gi", "2Gi", "2Gi")
	volumes, names := l.spread()
	mark := l.mark()
	l.lose(l.nodes[2], l.nodes[3])
	l.held(true, l.nodes[2], l.nodes[3])
	l.age(l.nodes[2])
	l.age(l.nodes[3])
	l.told(l.plugin.Name(), "NodeCleanupBreakerOpen", "2 of 4 nodes are lost")
	look := func() {
		for i := 2; i < 4; i++ {
			l.judged(p, l.nodes[i], volumes[i])
		}
	}
	look()
	if open := p.value("storage_controller_breaker_open", ""); open != 1 {
		t.Errorf("breaker_open is %v", open)
	}
	if held := p.value("storage_controller_cleanup_blocked", "gate=breaker"); held != 2 {
		t.Errorf("cleanup_blocked of the breaker is %v", held)
	}
	l.expect(l.deletions(mark, names), nil)

	// The driver is registered on no node. Its topology key is remembered.
	l.unregistered(0, 1)
	look()
	l.held(true, l.nodes[2], l.nodes[3])
	l.missing(l.nodes[2], l.nodes[3])
	l.registered(0, 1)

	l.must(l.approve(t.Context(), l.nodes[2]))
	l.terminating("p2")
	l.held(false, l.nodes[2])
	l.judged(p, l.nodes[3], volumes[3])
	l.held(true, l.nodes[3])
	l.expect(l.deletions(mark, names), []string{"delete persistentvolumeclaims p2"})

	l.register(3)
	l.recorded(l.nodes[3], "does not exist", func(n *nodecleanup.LostNode) bool { return n == nil })
	l.told(l.plugin.Name(), "NodeCleanupBreakerClosed", "")
	if open := p.value("storage_controller_breaker_open", ""); open != 0 {
		t.Errorf("breaker_open is %v", open)
	}
	l.expect(l.deletions(mark, names), []string{"delete persistentvolumeclaims p2"})
}

// TestNodeComesBack has nothing deleted of a node that was gone for less than the grace.
func TestNodeComesBack(t *testing.T) {
	l := newCluster(t, 2, false)
	p := l.keep("volumes", "--pv-release-grace=0s")
	l.published("2Gi", "2Gi")
	volumes, names := l.spread()
	mark := l.mark()
	for range 2 { // the second time, the grace period begins again
		began := time.Now()
		l.lose(l.nodes[0])
		if n := l.recorded(l.nodes[0], "has a clock",
			func(n *nodecleanup.LostNode) bool { return n != nil && !n.Since.IsZero() }); n.Since.Before(began) {
			t.Errorf("missing since %v, deleted at %v", n.Since, began)
		}
		l.judged(p, l.nodes[0], volumes[0])
		l.register(0)
		l.recorded(l.nodes[0], "does not exist", func(n *nodecleanup.LostNode) bool { return n == nil })
	}
	l.told(volumes[0], "NodeReturned", l.nodes[0])
	l.expect(l.deletions(mark, names), nil)
	l.agrees(2)
}

// TestNodeIsDrained retires a node in the order that the docs recommend: its claims go with
// it, without any grace period, since it cannot be an accident.
func TestNodeIsDrained(t *testing.T) {
	l := newCluster(t, 3, true)
	l.kubelets()
	l.keep("claims", "--node-finalizer-mode=manage", "--node-delete-grace=0s")
	l.published("2Gi", "2Gi", "2Gi")
	l.eventually("all nodes have the finalizer", func(ctx context.Context) error {
		for _, n := range l.nodes {
			node, err := l.client.CoreV1().Nodes().Get(ctx, n, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if !slices.Contains(node.Finalizers, l.name("node")) {
				return fmt.Errorf("%s has %v", n, node.Finalizers)
			}
		}
		return nil
	})
	l.statefulSet("web", l.class, 1)
	before := l.replicas(1)
	was := before["data-web-0"]
	l.unmounted(was.node, before)
	names := map[string]string{was.claim: was.claim, was.volume: "volume", was.node: "node"}
	mark := l.mark()

	_, err := l.client.CoreV1().Nodes().Patch(t.Context(), was.node, types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`),
		metav1.PatchOptions{})
	l.must(err)
	l.must(l.client.PolicyV1().Evictions(l.ns).Evict(t.Context(),
		&policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: "web-0", Namespace: l.ns}}))
	l.eventually("the next pod waits for its volume, which is on the drained node", func(ctx context.Context) error {
		pod, err := l.client.CoreV1().Pods(l.ns).Get(ctx, "web-0", metav1.GetOptions{})
		if err == nil && (pod.UID == was.pod || pod.Spec.NodeName != "" || len(pod.Status.Conditions) == 0) {
			err = fmt.Errorf("it is on %q, %v", pod.Spec.NodeName, pod.Status.Conditions)
		}
		return err
	})
	l.expect(l.done(mark, names), nil)
	l.must(l.client.CoreV1().Nodes().Delete(t.Context(), was.node, metav1.DeleteOptions{}))
	l.eventually("the node was deleted", func(ctx context.Context) error {
		node, err := l.client.CoreV1().Nodes().Get(ctx, was.node, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(err, fmt.Errorf("it has %v", node.Finalizers))
	})
	l.must(l.client.StorageV1().CSINodes().Delete(t.Context(), was.node, metav1.DeleteOptions{}))
	is := l.replicas(1)["data-web-0"]
	if is.node == was.node || is.uid == was.uid || is.volume == was.volume {
		t.Errorf("it was %+v, is %+v", was, is)
	}
	l.agrees(1)
	l.expect(l.done(mark, names), []string{"delete persistentvolumeclaims data-web-0", "patch nodes node"})
}

// TestOptOutOfANode outlives the node, until it is removed.
func TestOptOutOfANode(t *testing.T) {
	l := newCluster(t, 2, false)
	p := l.keep("claims")
	l.published("2Gi", "2Gi")
	volumes, names := l.spread()
	mark := l.mark()
	_, err := l.client.CoreV1().Nodes().Patch(t.Context(), l.nodes[0], types.MergePatchType, l.annotation("node-cleanup", "disabled"),
		metav1.PatchOptions{})
	l.must(err)
	l.lose(l.nodes[0])
	l.recorded(l.nodes[0], "has the opt-out", func(n *nodecleanup.LostNode) bool { return n != nil && n.OptedOut })
	l.must(l.approve(t.Context(), l.nodes[0]))
	l.recorded(l.nodes[0], "has the approval", func(n *nodecleanup.LostNode) bool { return n != nil && !n.Approved.IsZero() })
	l.judged(p, l.nodes[0], volumes[0])

	path, err := binary()
	l.must(err)
	l.eventually("the node is approved for all", func(context.Context) error { // the controller may write its records
		command := l.start(exec.Command(path, "nodecontroller", "approve", "--kubeconfig", l.cp.Kubeconfig(), "--driver-name",
			l.plugin.Name(), l.nodes[0], "--all", "--yes"))
		if code := command.code(); code != 0 {
			return fmt.Errorf("exit code %d, %s", code, command.logged())
		}
		return nil
	})
	l.recorded(l.nodes[0], "has the approval", func(n *nodecleanup.LostNode) bool { return n != nil && n.ApprovedAll })
	l.expect(l.deletions(mark, names), nil)

	// An administrator edits the record.
	l.eventually("the opt-out is removed from the record", func(ctx context.Context) error {
		cms := l.client.CoreV1().ConfigMaps(l.ns)
		cm, err := cms.Get(ctx, nodecleanup.ConfigMapName(l.plugin.Name()), metav1.GetOptions{})
		if err != nil {
			return err
		}
		cm.Data[l.nodes[0]] = strings.Replace(cm.Data[l.nodes[0]], `"optedOut":true`, `"optedOut":false`, 1)
		_, err = cms.Update(ctx, cm, metav1.UpdateOptions{})
		return err
	})
	l.terminating("p0")
	l.expect(l.deletions(mark, names), []string{"delete persistentvolumeclaims p0"})
}
