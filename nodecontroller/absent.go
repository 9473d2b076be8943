package nodecontroller

import (
	"context"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// cleanAbsent is for a node of which only the name is left, in claims that wait for a
// volume on it and in custom resources. Its volumes have a queue of their own.
func (t *term) cleanAbsent(ctx context.Context, name string) (time.Time, error) {
	t.noteClaims(name)
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
	if err := t.noteRecords(ctx, name); err != nil {
		return time.Time{}, err
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
	if next, err := t.cleanUnbound(ctx, name, nil, pass); err != nil || !next.IsZero() {
		return next, err
	}
	next, err := t.cleanRecords(ctx, name, func() ([]finding, error) { return t.gatesOfAbsent(ctx, name) }, "")
	switch {
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
	nodes, csiNodes, err := t.reader.named(ctx, t.index.topologyKey(), names, slices.Concat(names, t.index.nodesNamed(names)))
	if err != nil {
		return nil, err
	}
	if found := present(nodes, csiNodes); len(found) > 0 {
		return []finding{{gateAbsence, "NodeExists", "there is still " + strings.Join(found, ", ")}}, nil
	}
	granted, err := t.reader.approval(ctx, time.Now())
	if err != nil {
		return nil, err
	}
	if v, _ := t.ledger.judge(time.Now()); (v.open || t.ledger.isHeld(name)) && !granted.covers(names) {
		return []finding{{gateBreaker, "TooManyNodesLost", "the clean-up is held until an administrator approves it"}}, nil
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

// cleanRecords removes the custom resources of a node, unless one of its volumes, as the
// cache and then the API server has it, speaks for them. A node that is being deleted is
// not held for what is kept: nothing is left to do for it.
func (t *term) cleanRecords(ctx context.Context, node string, gates func() ([]finding, error), when ResourceWhen) (time.Time, error) {
	kept := t.keepsResources(node)
	if kept == "" {
		for _, name := range t.index.volumesOf(node) {
			s := t.look(name)
			if s.volume == nil || !t.belongs(s.volume, node) {
				continue
			}
			if _, err := t.refresh(ctx, s, false); err != nil {
				return time.Time{}, err
			}
		}
		kept = t.keepsResources(node)
	}
	if kept != "" {
		t.ledger.drop(keyOfRecords(node)) // nothing is to be done for them now
		if when == WhenNodeTerminating {
			return time.Time{}, nil
		}
		return time.Now().Add(later), nil
	}
	return t.cleanResources(ctx, node, func() ([]finding, error) {
		if why := t.keepsResources(node); why != "" {
			return []finding{{gateScope, "RecordOfAVolume", why}}, nil
		}
		return gates()
	}, when)
}

// keepsResources is why the custom resources of a lost node stay: one of its volumes may
// be what a resource is the record of. "" when nothing speaks for them any more.
func (t *term) keepsResources(node string) string {
	if name := t.ofUnknownNode(); name != "" {
		return "volume " + name + " may belong to it"
	}
	for _, name := range t.index.volumesOf(node) {
		s, _ := t.gather(name)
		switch {
		case s.volume == nil || !t.belongs(s.volume, node):
		case s.volume.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
			return "volume " + name + " is to be retained"
		case t.c.policy.outOfScope(s.wishes) != "":
			return t.c.policy.outOfScope(s.wishes)
		case s.volume.Annotations[t.c.policy.ann.hold] != "" && !s.approved:
			return "volume " + name + " is held"
		case s.claim != nil && s.volume.Spec.ClaimRef != nil && s.claim.UID == s.volume.Spec.ClaimRef.UID && s.claim.DeletionTimestamp == nil:
			return "volume " + name + " has its claim"
		}
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
