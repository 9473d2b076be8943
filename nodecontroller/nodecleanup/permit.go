// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
)

// Kind is what a step deletes.
type Kind string

// The kinds of steps.
const (
	KindNone       Kind = ""
	KindClaim      Kind = "claim"
	KindVolume     Kind = "volume"     // the PersistentVolume, without its driver
	KindFinalizers Kind = "finalizers" // of a PersistentVolume that is being deleted
	KindResource   Kind = "resource"
)

// Check is the label gate of the metric cleanup_blocked.
type Check string

// The checks.
const (
	CheckMode      Check = "mode"
	CheckScope     Check = "scope"
	CheckPolicy    Check = "policy"
	CheckAbsence   Check = "absence"
	CheckGrace     Check = "grace"
	CheckBreaker   Check = "breaker"
	CheckSanity    Check = "sanity"
	CheckUse       Check = "use"
	CheckAttached  Check = "attached"
	CheckOrder     Check = "order"     // not counted by the metric
	CheckFinalizer Check = "finalizer" // another component keeps the volume
	CheckForbidden Check = "forbidden" // the API server refused the request
	CheckFailed    Check = "failed"    // an attempt failed, and is repeated
)

// Reason is a failed check. Name is constant.
type Reason struct {
	Check         Check
	Name, Message string
	Until         time.Time // when time alone ends it; zero: never
	Node          string    // name of the Node that a problem is about; empty: none, or more than one
}

func (r Reason) String() string { return r.Name + ": " + r.Message }

// The names of the reasons that lists of the pass end.
const (
	nodesNotListed   = "NodesNotListed"
	volumesNotListed = "VolumesNotListed"
)

// listAge is the age at which a list of all Nodes and CSINodes must be repeated before a deletion.
const listAge = time.Minute

// facts are what decides about one deletion.
type facts struct {
	Now, Checked  time.Time // Checked: last check of the lost nodes
	Listed        time.Time // last list of all Nodes and CSINodes
	Kind          Kind
	Item          *item
	Hosts         []hostFacts // of Item
	KeyProblem    string
	Incomplete    string // see objects
	Unlabelled    []string
	Ready         bool
	Open          bool // the breaker
	Changed       bool // since the plan, the ConfigMap changed or another node was lost
	VolumesListed bool
}

// hostFacts are what decides about one host of a deletion.
type hostFacts struct {
	Value    string
	Presence presence
	Nodes    []*corev1.Node
	Record   LostNode // without fields if there is none
	Stale    bool
}

// rule is a condition of every deletion. Its refusals are found in order.
type rule struct {
	name    string
	check   Check
	refuses func(s Settings, f facts, refuse refuse)
}

// refuse adds a refusal, which ends at a time, or zero if time does not end it.
type refuse func(until time.Time, name, format string, args ...any)

// rules are the conditions of every deletion.
var rules = []rule{
	{"mode", CheckMode, checkMode},
	{"consent", CheckScope, checkConsent},
	{"opt-out", CheckScope, checkOptOut},
	{"record", CheckScope, checkRecord},
	{"bound", CheckPolicy, checkBound},
	{"retain", CheckPolicy, checkRetain},
	{"snapshot", CheckPolicy, checkSnapshot},
	{"provisioned", CheckPolicy, checkProvisioned},
	{"key", CheckAbsence, checkKey},
	{"unlabelled", CheckAbsence, checkUnlabelled},
	{"absence", CheckAbsence, checkAbsence},
	{"deleting", CheckGrace, checkDeleting},
	{"grace", CheckGrace, checkGrace},
	{"watched", CheckGrace, checkWatched},
	{"breaker", CheckBreaker, checkBreaker},
	{"ready", CheckSanity, checkReady},
	{"use", CheckUse, checkUse},
	{"attached", CheckAttached, checkAttached},
	{"order", CheckOrder, checkOrder},
	{"unchanged", CheckBreaker, checkUnchanged},
}

// ofItem are the checks that say nothing about an item whose read has failed.
var ofItem = []Check{CheckScope, CheckPolicy, CheckUse, CheckAttached, CheckOrder}

// mayClean returns every reason why a deletion must not happen now. Without a reason, it may. It is the only function that
// permits a deletion, and has no side effects. It is called with the state of the caches for the plan, and again with live reads
// before the request.
func mayClean(s Settings, f facts) (reasons []Reason) {
	for _, r := range rules {
		if f.Item.Unread != nil && slices.Contains(ofItem, r.check) {
			continue // checkAbsence refuses
		}
		r.refuses(s, f, func(until time.Time, name, format string, args ...any) {
			reasons = append(reasons, Reason{Check: r.check, Name: name, Message: fmt.Sprintf(format, args...), Until: until})
		})
	}
	return reasons
}

// never is the end of a refusal that time does not end.
var never time.Time

// volume reports whether f is about a PersistentVolume itself.
func (f facts) volume() bool { return f.Kind == KindVolume || f.Kind == KindFinalizers }

// with returns the hosts with a presence.
func (f facts) with(p presence) []hostFacts {
	return slices.DeleteFunc(slices.Clone(f.Hosts), func(h hostFacts) bool { return h.Presence != p })
}

// releasedAt returns when the volume of f was released, as far as the API server records that. Else it returns the latest of
// its creation, the request to delete it, and the loss of its hosts.
func (f facts) releasedAt() time.Time {
	pv := f.Item.Volume
	if pv.Status.LastPhaseTransitionTime != nil {
		return pv.Status.LastPhaseTransitionTime.Time
	}
	at := pv.CreationTimestamp.Time
	if pv.DeletionTimestamp != nil && pv.DeletionTimestamp.After(at) {
		at = pv.DeletionTimestamp.Time
	}
	for _, h := range f.Hosts {
		if h.Record.Since.After(at) {
			at = h.Record.Since
		}
	}
	return at
}

func checkMode(s Settings, f facts, refuse refuse) {
	switch {
	case !s.Deletes():
		refuse(never, "ReportOnly", "the mode of the cleanup is %s", s.mode())
	case f.volume() && s.NodeCleanup != ModeVolumes:
		refuse(never, "VolumeIsKept", "the mode of the cleanup is %s", s.mode())
	}
}

// checkConsent: an approval without --all ends the wait and the hold, and agrees to nothing. The owners of a custom resource without a
// volume do not agree either: an administrator may be recreating the volume.
func checkConsent(s Settings, f facts, refuse refuse) {
	annotation := CleanupAnnotation(s.Driver)
	agreed := s.NodeCleanupScope == ScopeAll
	for _, kind := range []string{"PersistentVolumeClaim", "StorageClass"} {
		if obj, ok := f.Item.Owners[kind]; ok && f.Item.Volume != nil {
			value, _ := Consent(annotation, kind, obj)
			agreed = agreed || value == enabled
		}
	}
	approved := len(f.Hosts) > 0 && !slices.ContainsFunc(f.Hosts, func(h hostFacts) bool {
		return !h.Record.ApprovedAll || h.Record.Approved.IsZero()
	})
	if !agreed && !approved {
		refuse(never, "Scope", "neither its StorageClass nor its claim has the annotation %s: %s", annotation, enabled)
	}
}

// checkOptOut: no approval overrides an opt-out.
func checkOptOut(s Settings, f facts, refuse refuse) {
	for _, kind := range []string{"PersistentVolume", "PersistentVolumeClaim", "StorageClass", "Namespace"} {
		if obj, ok := f.Item.Owners[kind]; ok && s.optOut(kind, obj) != "" {
			refuse(never, "Scope", "%s", s.optOut(kind, obj))
		}
	}
	for _, h := range f.Hosts {
		for _, n := range h.Nodes {
			if reason := s.optOut("Node", n); reason != "" {
				refuse(never, "Scope", "%s", reason)
			}
		}
	}
}

func checkRecord(s Settings, f facts, refuse refuse) {
	for _, h := range f.Hosts {
		switch r := h.Record; {
		case r.Unparsable:
			refuse(never, "Unparsable", "the record of node %s cannot be parsed. Correct or remove it in ConfigMap %s", h.Value,
				ConfigMapName(s.Driver))
		case r.OptedOut:
			refuse(never, "Scope", "Node %s had the annotation %s: %s, or an invalid value, when it was deleted", r.Name(),
				CleanupAnnotation(s.Driver), disabled)
		}
	}
}

func checkBound(_ Settings, f facts, refuse refuse) {
	pv, claim := f.Item.Volume, f.Item.Claim
	if pv == nil {
		if f.Kind != KindResource {
			refuse(never, "NotBound", "there is no volume")
		}
		return
	}
	ref := pv.Spec.ClaimRef
	switch {
	case pv.Status.Phase == corev1.VolumeFailed:
		refuse(never, "Failed", "the volume is in phase Failed. Delete it if its data is not needed")
	case ref == nil && !f.volume(), ref != nil && ref.UID == "":
		refuse(never, "NotBound", "volume %s is not bound to a claim", pv.Name)
	case ref != nil && !namesClaim(ref):
		refuse(never, "NotBound", "claimRef %s/%s is no valid name. Correct it, or delete the volume", ref.Namespace, ref.Name)
	case claim == nil && f.Kind == KindClaim:
		refuse(never, "NotBound", "volume %s has no claim", pv.Name)
	case claim == nil:
	case claim.UID != ref.UID || claim.Spec.VolumeName != pv.Name:
		refuse(never, "NotBound", "claim %s/%s and the volume are not bound to each other", claim.Namespace, claim.Name)
	case claim.Status.Phase == corev1.ClaimLost:
		refuse(never, "ClaimLost", "claim %s/%s is in phase Lost. Delete it if its data is not needed", claim.Namespace, claim.Name)
	}
}

func checkRetain(s Settings, f facts, refuse refuse) {
	if f.Item.Volume == nil {
		return
	}
	policy := f.Item.Volume.Spec.PersistentVolumeReclaimPolicy
	kept := f.Kind == KindClaim && policy == corev1.PersistentVolumeReclaimRetain && s.NodeCleanupRetain == RetainClaim
	if policy != corev1.PersistentVolumeReclaimDelete && !kept {
		refuse(never, "Retain", "its reclaim policy is %s", policy)
	}
}

// checkSnapshot: no PersistentVolume and no claim says whether a snapshot is to be kept. A deletion of its content requests its deletion.
func checkSnapshot(_ Settings, f facts, refuse refuse) {
	if res := f.Item.Resource; f.Kind == KindResource && res.Snapshot && !res.Deleting {
		refuse(never, "Snapshot", "it is a snapshot. Delete its VolumeSnapshot if it is not needed")
	}
}

func checkProvisioned(s Settings, f facts, refuse refuse) {
	if f.volume() && f.Item.Volume.Annotations[storagehelpers.AnnDynamicallyProvisioned] != s.Driver {
		refuse(never, "Static", "the driver has not provisioned it. Delete the volume if its data is not needed")
	}
}

func checkKey(_ Settings, f facts, refuse refuse) {
	if f.KeyProblem != "" {
		refuse(never, "TopologyKeyUnknown", "%s. %s", f.KeyProblem, keyAdvice)
	}
}

func checkUnlabelled(_ Settings, f facts, refuse refuse) {
	if lost := f.with(missing); len(lost) > 0 && len(f.Unlabelled) > 0 {
		refuse(never, "NodeWithoutLabel", "Node %s lacks the label of the topology key and may be %s", strings.Join(f.Unlabelled, ", "),
			lost[0].Value)
	}
}

func checkAbsence(_ Settings, f facts, refuse refuse) {
	if f.Item.Unread != nil {
		refuse(never, "NotRead", "%v", f.Item.Unread)
	}
	if f.Incomplete != "" {
		refuse(never, "Incomplete", "%s", f.Incomplete)
	}
	if len(f.Hosts) == 0 {
		refuse(never, "NotLocal", "it belongs to no node")
	}
	// Host names and node IDs of a missing Node are known from lists only.
	if len(f.with(missing)) > 0 && f.Now.Sub(f.Listed) > listAge {
		refuse(never, nodesNotListed, "the Nodes were not listed within the last %v", listAge)
	}
	for _, h := range f.Hosts {
		switch {
		case h.Stale:
			refuse(never, "NodeExists", "the cache still has a Node that may be %s", h.Value)
		case h.Presence != missing && h.Presence != deleting:
			refuse(never, "NodeExists", "a Node or CSINode that may be %s exists", h.Value)
		}
	}
}

func checkDeleting(s Settings, f facts, refuse refuse) {
	for _, h := range f.with(deleting) {
		if len(h.Nodes) == 0 {
			refuse(never, "NodeChanged", "no Node of %s is known", h.Value)
		}
		for _, n := range h.Nodes {
			switch {
			case n.DeletionTimestamp == nil || n.UID != h.Record.UID:
				refuse(never, "NodeChanged", "Node %s is not the one that was being deleted", n.Name)
			case !s.holds(n):
				refuse(never, "NodeReleased", "Node %s does not wait for finalizer %s", n.Name, s.NodeFinalizer)
			default:
				if until, drains := s.drains(h.Record, n, f.Now); drains {
					refuse(until, "DeleteGrace", "pods may still be draining from Node %s (--node-delete-grace, or finalizers of other "+
						"components)", n.Name)
				}
			}
		}
	}
}

// drains reports whether pods may still be draining from n, which is being deleted, and until when, zero if time does not end it. r is
// the record of its host.
func (s Settings) drains(r LostNode, n *corev1.Node, now time.Time) (until time.Time, drains bool) {
	others := slices.ContainsFunc(n.Finalizers, func(f string) bool { return f != s.NodeFinalizer })
	if s.NodeFinalizerWaitForOthers && others && isReady(n) {
		return never, true
	}
	until = s.graceEnd(r, n)
	return until, now.Before(until)
}

// graceEnd returns the end of --node-delete-grace for n, which is being deleted. r is the record of its host.
func (s Settings) graceEnd(r LostNode, n *corev1.Node) time.Time {
	start := n.DeletionTimestamp.Time
	if r.Restarted.After(start) {
		start = r.Restarted
	}
	return start.Add(s.NodeDeleteGrace)
}

func checkGrace(s Settings, f facts, refuse refuse) {
	for _, h := range f.with(missing) {
		r := h.Record
		switch due := r.Since.Add(s.NodeMissingGrace); {
		case r.Since.IsZero():
			refuse(never, "NotRecorded", "there is no record that %s is missing", r.Name())
		case r.Approved.IsZero() && f.Now.Before(due):
			refuse(due, "Grace", "node %s has been missing for less than %v", r.Name(), s.NodeMissingGrace)
		}
	}
}

func checkWatched(s Settings, f facts, refuse refuse) {
	for _, h := range f.with(missing) {
		if s.unwatched(h.Record, f.Checked, f.Now) {
			refuse(never, "NotWatched", "no process has watched node %s for %v, so its grace period starts again", h.Record.Name(),
				s.ClockGap)
		}
	}
}

// unwatched reports whether no process has checked a lost node for so long that it may have existed meanwhile. last is the time
// of the last check. A clock that was set forward for as long has the same effect: the grace may not have passed.
func (s Settings) unwatched(r LostNode, last, now time.Time) bool {
	seen := r.Since
	for _, at := range []time.Time{last, r.Restarted} {
		if at.After(seen) && !at.After(now) {
			seen = at
		}
	}
	return now.Sub(seen) > s.ClockGap
}

func checkBreaker(s Settings, f facts, refuse refuse) {
	for _, h := range f.Hosts {
		if r := h.Record; r.Held != "" || f.Open && !r.exempt() {
			refuse(never, "TooManyNodesLost", "too many nodes are lost, and the cleanup of %s is not approved. If it does not return, "+
				"run %s", r.Name(), s.approveCommand(r))
		}
	}
}

// approveCommand returns the command that approves the cleanup of a lost node.
func (s Settings) approveCommand(r LostNode) string {
	return fmt.Sprintf("storage-controller nodecontroller approve --driver-name=%s %s --yes", s.Driver, r.Name())
}

func checkReady(_ Settings, f facts, refuse refuse) {
	if len(f.with(missing)) > 0 && !f.Ready {
		refuse(never, "NoReadyNode", "no node with the driver is ready, so the cluster itself may be broken")
	}
}

func checkUse(_ Settings, f facts, refuse refuse) {
	if len(f.Item.Users) > 0 {
		refuse(never, "ClaimInUse", "pod %s uses the claim on a node that exists", strings.Join(f.Item.Users, ", "))
	}
}

func checkAttached(_ Settings, f facts, refuse refuse) {
	if f.volume() && len(f.Item.Attachments) > 0 {
		refuse(never, "Attached", "VolumeAttachment %s names the volume. It must be detached first", strings.Join(f.Item.Attachments, ", "))
	}
}

// checkOrder: claim, volume, finalizers. Kubernetes releases a volume when its claim is deleted, and the driver then has
// --pv-release-grace to delete it. The custom resource of a volume follows the claim.
func checkOrder(s Settings, f facts, refuse refuse) {
	pv, claim := f.Item.Volume, f.Item.Claim
	switch {
	case f.Kind == KindResource && pv == nil && !f.VolumesListed:
		refuse(never, volumesNotListed, "a volume that the cache does not have may belong to it")
	case f.Kind == KindResource && claim != nil && claim.DeletionTimestamp == nil:
		refuse(never, "ClaimExists", "claim %s/%s of its volume is not being deleted", claim.Namespace, claim.Name)
	case !f.volume():
	case claim != nil:
		refuse(never, "ClaimExists", "its claim %s/%s exists", claim.Namespace, claim.Name)
	case len(f.with(deleting)) > 0:
		refuse(never, "NodeExists", "its Node is being deleted")
	case pv.Status.Phase != corev1.VolumeReleased && pv.Status.Phase != corev1.VolumeAvailable:
		refuse(never, "NotReleased", "the volume is in phase %s", pv.Status.Phase)
	case f.Now.Before(f.releasedAt().Add(s.PVReleaseGrace)):
		refuse(f.releasedAt().Add(s.PVReleaseGrace), "ReleaseGrace", "the driver may still delete the volume")
	}
}

func checkUnchanged(_ Settings, f facts, refuse refuse) {
	if f.Changed {
		refuse(never, "Changed", "%v", errChanged)
	}
}

// factsOf returns the facts of an item as the world of a plan has them, with its records.
func factsOf(s Settings, p Plan, it *item) facts {
	w := p.world
	f := facts{
		Now: w.Now, Checked: p.Records.Checked, Listed: w.Listed, Kind: nextKind(s, it), Item: it, KeyProblem: w.KeyProblem,
		Incomplete: w.Incomplete, Unlabelled: w.Unlabelled, Ready: w.Ready, Open: p.Breaker.Open, VolumesListed: w.VolumesListed,
	}
	for _, value := range it.Values {
		h := hostFacts{Value: value, Presence: present, Record: LostNode{Value: value}}
		if known := w.Hosts[value]; known != nil {
			h.Presence, h.Nodes, h.Stale = known.Presence, known.Nodes, known.Stale
		}
		if r, ok := p.Records.Lost[value]; ok {
			h.Record = r
		}
		f.Hosts = append(f.Hosts, h)
	}
	return f
}

// liveFacts returns the facts of a due step as src, the API server, has them, or an item without a volume and custom resource if
// they do not exist any more. The facts about all nodes are those of p, whose lists are at most a minute old. The caller sets
// Now and Changed after it.
func liveFacts(ctx context.Context, s Settings, src uncachedReader, p Plan, st Step) (facts, error) {
	it, err := reread(ctx, s, src, p.world.Key, st.Item)
	if err != nil {
		return facts{}, err
	}
	f := factsOf(s, p, &it)
	for i, h := range f.Hosts { // last, so that a returning node is found
		f.Hosts[i].Presence, f.Hosts[i].Nodes, err = readHost(ctx, s, src, p.world.Key, h.Value, h.Record.Node, p.world.names[h.Value])
		if err != nil {
			return facts{}, err
		}
	}
	return f, nil
}
