// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// action names the next step of a call.
type action int

const (
	doAnswer     action = iota // with the LogicalVolume, or with an error
	doWait                     // for a change of the LogicalVolume, its source or its Node, or until a time
	doReadVolume               // from the API server
	doReadNode
	doReadSource
	doCreate
	doDelete // and answer if the step has an error
	doResize // and answer if the step has an error
)

// step is an action and its arguments.
type step struct {
	action action
	err    error     // of doAnswer, doDelete and doResize
	until  time.Time // of doWait; zero means without a limit
	works  bool      // of doWait: topolvm-node works for the call
	lv     *LogicalVolume
	exact  bool   // of doDelete: only in this version
	size   Bytes  // of doResize
	retry  bool   // of doResize: topolvm-node tries again
	value  string // of doReadNode
	later  bool   // of doAnswer with an error: a change of lv has the claim retried
}

func failed(err error) step { return step{action: doAnswer, err: err} }

// fail returns the step that answers with [subject.errorf].
func (s subject) fail(code codes.Code, format string, args ...any) step {
	return failed(s.errorf(code, format, args...))
}

// staleAfter is the time after which the failure of an earlier expansion counts for this one, too: the status has not changed.
const staleAfter = 3 * time.Second

// waitForNode returns the step of a call that waits for topolvm-node. It does not wait for a Node that does not exist, that is not
// Ready or that is being deleted: each call occupies a worker of the caller, and has the node cleanup wait.
func (s volumeState) waitForNode() step {
	about, what := subjectOf(s.lv), "created"
	switch {
	case s.terminating():
		what = "deleted"
	case s.lv.exists():
		what = "expanded"
	}
	switch {
	case s.node.object == nil && !s.node.read:
		return step{action: doReadNode, value: s.node.value, lv: s.lv}
	case s.node.object == nil:
		return about.fail(codes.Aborted, "it cannot be %s, because the Node does not exist. Bring the node back, or have its "+
			"LogicalVolumes deleted by the node cleanup", what)
	case s.node.object.DeletionTimestamp != nil:
		return about.fail(codes.Aborted, "it is not %s yet, because the Node is being deleted. The node cleanup deletes its LogicalVolumes",
			what)
	case !s.node.ready():
		return about.fail(codes.Aborted, "it is not %s yet, because the Node is not Ready. Check the node, or delete its Node object "+
			"if it does not return", what)
	}
	return step{action: doWait, lv: s.lv}
}

// place returns the topology value for a new LogicalVolume, or an error. nodes lists all Nodes.
func place(n names, r creation, source *LogicalVolume, nodes func() []*corev1.Node) (string, error) {
	about := r.subject()
	switch {
	case r.sourceID != "" && (source == nil || source.terminating()):
		return "", about.errorf(codes.NotFound, "its source with ID %s does not exist or is being deleted. Check the data source",
			r.sourceID)
	case source != nil && source.Status.CurrentSize == 0:
		return "", about.errorf(codes.Aborted, "its source, %s, has no size yet. Repeat the call", subjectOf(source))
	case source != nil && !r.snapshot && r.size < source.Status.CurrentSize:
		return "", about.errorf(codes.OutOfRange, "the requested size %s is less than the size %s of its source %s on node %s. Request at "+
			"least that", r.size, source.Status.CurrentSize, source.Name, source.Spec.NodeName)
	case source != nil && !r.snapshot && r.class != source.Spec.DeviceClass:
		return "", about.errorf(codes.InvalidArgument, "its source is %s. Use a StorageClass with the device class of the source",
			subjectOf(source))
	case source != nil && !r.require.allows(source.Spec.NodeName):
		return "", about.errorf(codes.ResourceExhausted, "it must be on node %s, with its source %s, but the request does not allow that "+
			"node. Schedule the pod to it", source.Spec.NodeName, source.Name)
	case source != nil:
		return source.Spec.NodeName, nil
	case r.require != nil:
		return r.require[0], nil
	}
	best, free := n.roomiest(nodes(), r.class)
	switch {
	case best == nil:
		return "", about.errorf(codes.ResourceExhausted, "no node has available capacity of the device class. Check lvmd, or add nodes")
	case free < r.size:
		return "", about.errorf(codes.ResourceExhausted, "it needs %s, but the node with the most available capacity, %s, has %s. Free "+
			"space, or add nodes", r.size, best.Name, free)
	}
	return n.valueOf(best), nil
}

// decideNew returns the step for a creation without a LogicalVolume.
func decideNew(n names, r creation, s creationState) step {
	if s.placeErr != nil {
		return failed(s.placeErr)
	}
	lv := r.object(n, s.place, s.source)
	refuse := func(format string, args ...any) step {
		return subjectOf(lv).fail(codes.ResourceExhausted, format, args...)
	}
	node := s.node.object
	switch {
	case node == nil && !s.node.read:
		return step{action: doReadNode, value: s.place, lv: lv}
	case node == nil:
		return refuse("no Node has this name, or this value of the label %s. Use another node", n.topologyKey())
	case node.DeletionTimestamp != nil:
		return refuse("the Node is being deleted. Use another node")
	}
	if _, reported := n.available(node, lv.Spec.DeviceClass); !reported && len(n.capacities(node)) > 0 {
		return refuse("the node does not have the device class. Add the class to lvmd on the node, or use another node")
	}
	return step{action: doCreate, lv: lv}
}

// decideCreation returns the next step of CreateVolume or CreateSnapshot. It handles every state.
func decideCreation(n names, r creation, s creationState) step {
	lv := s.lv
	switch {
	case s.awaited != "" && (lv == nil || lv.UID != s.awaited || s.terminating()):
		about := r.subject()
		if lv != nil {
			about = subjectOf(lv)
		}
		return about.fail(codes.Aborted, "it was deleted during the creation. Repeat the call")
	case lv == nil:
		// The caller takes a refusal for final, and the cache may lack the LogicalVolume of an earlier call.
		next := decideNew(n, r, s)
		if next.action == doAnswer && !s.absent {
			return step{action: doReadVolume, lv: &LogicalVolume{ObjectMeta: metav1.ObjectMeta{Name: r.name}}}
		}
		return next
	case !s.read: // the cache may have one that was deleted
		return step{action: doReadVolume, lv: lv}
	case s.terminating():
		return s.waitForNode()
	}
	about := subjectOf(lv)
	if lv.IsIgnored(string(n)) {
		return about.fail(codes.Aborted, "topolvm-node ignores it, because the node cleanup deletes it. Repeat the call")
	}
	if why := r.differs(lv, s.sourceName); why != "" {
		return about.fail(codes.AlreadyExists, "%s. Use another name, or delete the LogicalVolume if nothing uses it", why)
	}
	allowed, exists := r.require.allows(lv.Spec.NodeName), lv.exists()
	node := s.node.object
	switch {
	case exists && !allowed:
		return about.fail(codes.AlreadyExists, "the volume exists, on a node that the request does not allow. Use node %s, or "+
			"delete the claim", lv.Spec.NodeName)
	case !exists && allowed && node == nil && !s.node.read:
		return step{action: doReadNode, value: s.node.value, lv: lv}
	// Another LogicalVolume replaces it. The node cleanup keeps what a claim waits for.
	case !exists && (!allowed || node == nil || node.DeletionTimestamp != nil):
		return step{action: doDelete, exact: true, lv: lv}
	case !exists && lv.Status.Code != 0: // topolvm-node does not try again
		return step{action: doDelete, exact: true, lv: lv, err: nodeError(lv, true)}
	case !exists && lv.Spec.Source != "" && sourceProblem(s) != nil:
		if !s.sourceRead {
			return step{action: doReadSource, lv: lv}
		}
		return step{action: doDelete, exact: true, lv: lv, err: sourceProblem(s)}
	case !exists || lv.Status.CurrentSize == 0:
		wait := s.waitForNode()
		wait.works, wait.lv, wait.later = true, lv, true
		return wait
	case r.limit > 0 && lv.Status.CurrentSize > r.limit && s.began:
		return step{action: doDelete, exact: true, lv: lv, err: aboveLimit(lv, r.limit, codes.OutOfRange)}
	case r.limit > 0 && lv.Status.CurrentSize > r.limit: // an earlier call may have returned it
		return failed(aboveLimit(lv, r.limit, codes.AlreadyExists))
	}
	return step{action: doAnswer, lv: lv}
}

func aboveLimit(lv *LogicalVolume, limit Bytes, code codes.Code) error {
	return subjectOf(lv).errorf(code, "its size, rounded up to extents, is %s, above the limit of %s. Raise the limit, or request less",
		lv.Status.CurrentSize, limit)
}

// sourceProblem returns why topolvm-node cannot create the LVM volume from its source, which it does not report, or nil.
func sourceProblem(s creationState) error {
	about := subjectOf(s.lv)
	switch {
	case s.source == nil:
		return about.errorf(codes.NotFound, "its source %s was deleted. Check the data source", s.lv.Spec.Source)
	case s.source.Status.CurrentSize > s.lv.Spec.Size:
		return about.errorf(codes.Aborted, "its source %s was expanded meanwhile. Repeat the call, and request at least that size",
			s.lv.Spec.Source)
	}
	return nil
}

// decideDeletion returns the next step of DeleteVolume, or of DeleteSnapshot if snapshot is set.
func decideDeletion(s volumeState, snapshot bool) step {
	switch {
	case s.lv == nil, s.lv.IsSnapshot() != snapshot:
		return step{action: doAnswer, lv: s.lv}
	case !s.terminating():
		return step{action: doDelete, lv: s.lv}
	}
	return s.waitForNode()
}

// decideExpansion returns the next step of ControllerExpandVolume. r has a capacity range.
func decideExpansion(n names, r *csi.ControllerExpandVolumeRequest, s volumeState) step {
	lv := s.lv
	switch {
	case lv == nil:
		return subject{lv: "with ID " + r.GetVolumeId()}.fail(codes.NotFound, "there is none. Check that the volume exists")
	case lv.IsSnapshot():
		return subjectOf(lv).fail(codes.InvalidArgument, "a snapshot cannot be expanded. Restore it to a volume")
	case s.terminating():
		return subjectOf(lv).fail(codes.FailedPrecondition, "it is being deleted, so it cannot be expanded. Use another volume")
	case !lv.exists():
		return subjectOf(lv).fail(codes.Aborted, "its LVM volume is not created yet. Repeat the call")
	}
	target, err := sizeOf(subjectOf(lv), r.GetCapacityRange(), 0)
	if err != nil {
		return failed(err)
	}
	about, current := subjectOf(lv), lv.size()
	// Without a current size, spec.size is only what an earlier call has requested.
	_, requested := lv.Annotations[n.resizeRequested()]
	unknown := lv.Status.CurrentSize == 0 && (requested || s.before != nil)
	switch {
	case target <= current && lv.Spec.Size > current:
		return step{action: doResize, lv: lv, size: current} // cancels an earlier expansion
	case target <= current && !unknown:
		return step{action: doAnswer, lv: lv}
	case target < current: // spec.size must not become less than the volume may be
		return about.fail(codes.Aborted, "an expansion to %s was requested, and topolvm-node has not reported the size. Repeat "+
			"the call", current)
	case lv.Spec.Size != target && s.before != nil:
		return about.fail(codes.Aborted, "another client changed spec.size during the expansion to %s. Repeat the call", target)
	case lv.Spec.Size != target:
		return decideRequest(n, target, s)
	case s.before == nil && lv.Status.Code != 0:
		return step{action: doResize, lv: lv, size: target, retry: true}
	case s.before != nil && lv.Status.Code != 0 && lv.Status != *s.before, s.stale():
		return step{action: doResize, lv: lv, size: current, err: nodeError(lv, false)}
	}
	wait := s.waitForNode()
	wait.works = true
	if lv.Status.Code != 0 && wait.action == doWait {
		wait.until = s.since.Add(staleAfter)
	}
	return wait
}

// stale reports whether topolvm-node has not changed the status of an earlier failure for a while: it has failed again.
func (s volumeState) stale() bool {
	return s.before != nil && s.lv.Status.Code != 0 && !s.now.Before(s.since.Add(staleAfter))
}

// decideRequest returns the step that requests an expansion, if the Node has enough space.
func decideRequest(n names, target Bytes, s volumeState) step {
	about, needed := subjectOf(s.lv), target-s.lv.size()
	if s.node.object == nil {
		if !s.node.read {
			return step{action: doReadNode, value: s.node.value, lv: s.lv}
		}
		return about.fail(codes.FailedPrecondition, "the Node does not exist. Bring the node back")
	}
	free, reported := n.available(s.node.object, s.lv.Spec.DeviceClass)
	switch {
	case !reported:
		return about.fail(codes.FailedPrecondition, "the node reports no capacity of the device class. Check topolvm-node and "+
			"lvmd on the node")
	case free < needed:
		return about.fail(codes.ResourceExhausted, "the expansion to %s needs %d bytes, but the node has %d. Free space on the "+
			"node, or request less", target, needed, free)
	}
	return step{action: doResize, lv: s.lv, size: target, retry: true}
}

// size returns the size of the volume. Old versions of topolvm-node report none.
func (lv *LogicalVolume) size() Bytes {
	if lv.Status.CurrentSize != 0 {
		return lv.Status.CurrentSize
	}
	return lv.Spec.Size
}

// String returns the value of "action" in logs.
func (a action) String() string {
	return [...]string{"answer", "wait", "read volume", "read node", "read source", "create", "delete", "resize"}[a]
}
