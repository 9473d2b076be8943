package nodecontroller

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// cleanAbsent is for a node of which only the name is left, in claims that wait for a
// volume on it and in custom resources. Its volumes have a queue of their own.
func (t *term) cleanAbsent(ctx context.Context, name string) (time.Time, error) {
	t.noteClaims(name)
	t.holdWaiting(ctx, keyOfClaims(name))
	unbound, _ := t.claimsSelecting(name)
	if t.c.cfg.NodeCleanupUnbound == UnboundIgnore {
		unbound = nil
	}
	if len(unbound) == 0 && len(t.c.resources) == 0 || !t.c.policy.writes() || !t.c.policy.orphanPath || t.index.topologyKey() == "" {
		t.memory.clear(t.memory.absent, name)
		return time.Time{}, nil
	}
	now := time.Now()
	// The process may have begun long after the node has gone: its grace begins with it.
	since := t.memory.since(t.memory.absent, name, now)
	approved := t.approved(now).covers([]string{name})
	if due := since.Add(t.c.policy.missingGrace); now.Before(due) && !approved {
		return due, nil
	}
	records, err := t.hasRecords(ctx, name)
	switch {
	case err != nil && !isAnswer(err):
		return time.Time{}, err
	case err == nil && !records && len(unbound) == 0: // nothing is left that the gates have to be asked for
		t.memory.clear(t.memory.absent, name)
		return time.Time{}, nil
	}
	closed, err := t.gatesOfAbsent(ctx, name)
	if err != nil {
		return time.Time{}, err
	}
	if len(closed) > 0 {
		if closed[0].gate == gateAbsence {
			t.memory.clear(t.memory.absent, name)
		}
		for _, claim := range unbound {
			t.c.notify.seldom(claim, closed[0].reason, warning(reasonSkipped, "Nothing is cleaned up: %s", closed[0]))
		}
		return time.Now().Add(later), nil
	}
	pass := &nodePass{name: name, settled: map[string]bool{}}
	if t.c.policy.dryRun && t.memory.has(t.memory.nodes, name) {
		return time.Time{}, nil
	}
	next, refused := t.cleanUnbound(ctx, name, nil, pass)
	if !next.IsZero() || refused != nil && !isAnswer(refused) {
		return next, refused
	}
	next, err = t.cleanRecords(ctx, name, func() ([]finding, error) { return t.gatesOfAbsent(ctx, name) }, "")
	switch err = errors.Join(refused, err); {
	case err != nil || !next.IsZero():
	case t.c.policy.dryRun:
		t.memory.since(t.memory.nodes, name, now)
	default:
		t.memory.clear(t.memory.absent, name)
	}
	return next, err
}

// gatesOfAbsent is what has to hold of a node that is gone right before anything of it is
// destroyed, but for its grace.
func (t *term) gatesOfAbsent(ctx context.Context, name string) ([]finding, error) {
	if !t.c.policy.writes() || !t.c.policy.orphanPath {
		return []finding{{gateMode, "ReportOnly", "the mode of the clean-up is " + string(t.c.policy.mode)}}, nil
	}
	if t.c.departed.optedOut(name) {
		return []finding{{gateScope, "Scope", "Node " + name + " had the annotation " + t.c.policy.ann.cleanup + ": " + disabled + " when it went"}}, nil
	}
	names := []string{name}
	granted, err := t.reader.approval(ctx, time.Now())
	if err != nil {
		return nil, err
	}
	if v, _ := t.ledger.judge(time.Now()); (v.open || t.ledger.isHeld(name)) && !granted.covers(names) {
		return []finding{{gateBreaker, "TooManyNodesLost", "the clean-up is held until an administrator approves it"}}, nil
	}
	if closed, err := t.presentAs(ctx, name); err != nil || len(closed) > 0 {
		return closed, err
	}
	f := &facts{}
	if f.readyNode, err = t.reader.readyNode(ctx, t.likelyReady()); err != nil {
		return nil, err
	}
	if f.sameCluster, err = t.reader.sameCluster(ctx); err != nil {
		return nil, err
	}
	return f.findings(), nil
}

// presentAs is closed while a Node or CSINode exists that name may mean. All of them are
// read only when nothing else has been found.
func (t *term) presentAs(ctx context.Context, name string) ([]finding, error) {
	names := []string{name}
	called := slices.Concat(names, t.index.nodesNamed(names), t.index.formerly(names))
	for _, every := range []bool{false, true} {
		if every {
			all, err := t.everyNode(ctx)
			if err != nil {
				return nil, err
			}
			if called = all.names.find(names); len(called) == 0 {
				break
			}
		}
		nodes, csiNodes, err := t.reader.named(ctx, t.index.topologyKey(), names, called)
		if err != nil {
			return nil, err
		}
		if found := present(nodes, csiNodes); len(found) > 0 {
			return []finding{{gateAbsence, "NodeExists", "there is still " + strings.Join(found, ", ")}}, nil
		}
	}
	return nil, nil
}

// cleanRecords removes the custom resources of a node, unless one of its volumes speaks for
// them. A node that is being deleted is not held for what is kept: nothing is left to do for it.
func (t *term) cleanRecords(ctx context.Context, node string, gates func() ([]finding, error), when ResourceWhen) (time.Time, error) {
	looked := time.Now()
	kept, err := t.keepsRecords(ctx, node)
	if err != nil {
		return time.Time{}, err
	}
	if kept != "" {
		t.ledger.drop(keyOfRecords(node)) // nothing is to be done for them now
		if when == WhenNodeTerminating {
			return time.Time{}, nil
		}
		return time.Now().Add(later), nil
	}
	return t.cleanResources(ctx, node, func() ([]finding, error) {
		if time.Since(looked) > recordsLook {
			looked = time.Now()
			if why, err := t.keepsRecords(ctx, node); err != nil || why != "" {
				return []finding{{gateScope, "RecordOfAVolume", why}}, err
			}
		}
		return gates()
	}, when)
}

// recordsLook is how long the look at all volumes of a node serves for its custom
// resources: no more than for those that one burst removes.
const recordsLook = time.Second

// keepsRecords is why the custom resources of a lost node stay: one of its volumes, as the
// API server has it now, may be what a resource is the record of. "" when nothing speaks for
// them any more.
func (t *term) keepsRecords(ctx context.Context, node string) (string, error) {
	if name := t.ofUnknownNode(); name != "" {
		return "volume " + name + " may belong to it", nil
	}
	local := t.index.volumesOf(node)
	for _, name := range t.index.mentioning(t.index.namesOf(node)) {
		if !slices.Contains(local, name) {
			return "volume " + name + " names it by another key", nil
		}
	}
	for _, name := range local {
		if s, _ := t.gather(name); s.volume == nil || t.keepsRecord(s) != "" { // what the cache says is enough to keep it
			if s.volume != nil {
				return t.keepsRecord(s), nil
			}
			continue
		}
		live, err := t.refresh(ctx, t.look(name), false)
		if err != nil {
			return "", err
		}
		if live.volume != nil && t.keepsRecord(live) != "" {
			return t.keepsRecord(live), nil
		}
	}
	return "", nil
}

// keepsRecord is why the record of one volume stays, "" when it need not.
func (t *term) keepsRecord(s snapshot) string {
	name, p := s.volume.Name, t.c.policy
	switch {
	case s.volume.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
		return "volume " + name + " is to be retained"
	case p.outOfScope(s.wishes) != "":
		return p.outOfScope(s.wishes)
	case s.volume.Annotations[p.ann.hold] != "" && !s.approved:
		return "volume " + name + " is held"
	case s.claim != nil && s.volume.Spec.ClaimRef != nil && s.claim.UID == s.volume.Spec.ClaimRef.UID && s.claim.DeletionTimestamp == nil:
		return "volume " + name + " has its claim"
	}
	return ""
}

// ofUnknownNode is a volume of which nobody knows to which node it belonged: the value in
// its affinity need not be the name of one, and nobody saw the node go or wrote it down.
// "" when there is none, or when the nodes of this cluster are named by their values.
func (t *term) ofUnknownNode() string {
	key, named := t.index.topologyKey(), true
	for _, name := range t.index.driverNodes() {
		if node, ok := t.c.nodes.Get(name); ok && node.Labels[key] != name {
			named = false
		}
	}
	if named {
		return ""
	}
	for _, volume := range t.ledger.keys() {
		if s := t.look(volume); s.volume != nil && s.member.place == placeOrphan && s.tombstone == nil && len(t.c.policy.ann.lostNodes(s.volume)) == 0 {
			return volume
		}
	}
	return ""
}
