package nodecontroller

import (
	"context"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// gather reads the caches about a volume, and the own writes that they have not seen yet.
// What it finds is noted in the ledger, and the verdict of the breaker is about that.
func (t *term) gather(name string) (snapshot, step) {
	s := t.look(name)
	if s.volume == nil {
		t.ledger.drop(name)
		return s, t.c.policy.decide(s)
	}
	if !s.member.guessed { // the label may only be late in the cache: ask first
		t.notePresence(s)
	}
	switch s.member.place {
	case placeTerminating, placeUnclear, placeOrphan, placeFenced:
		t.ledger.set(name, t.entryOf(s))
	case placeHealthy:
		t.ledger.drop(name)
	default:
		if t.index.topologyKey() != "" { // else what was counted stays so until it can be found again
			t.ledger.drop(name)
		}
	}
	s.open = t.isOpen(s)
	st := t.c.policy.decide(s)
	if clock := s.volume.Annotations[t.c.policy.ann.missing]; clock != s.kept {
		if _, ok := t.c.policy.clock(s); ok {
			t.memory.change(s.volume.UID, func(r *remembered) { r.kept = clock })
		}
	}
	t.ledger.mark(name, st)
	return s, st
}

// entryOf is what a volume contributes to the ledger whose node is gone, or may be.
func (t *term) entryOf(s snapshot) entry {
	return entry{
		nodes: s.nodes, place: s.member.place, pending: t.awaits(s) && !s.unwritable,
		held: s.volume.Annotations[t.c.policy.ann.hold] != "" && !s.approved,
	}
}

// awaits tells whether something is to be done for a volume.
func (t *term) awaits(s snapshot) bool {
	return t.c.policy.counts(s.member.place) && t.c.policy.goal(s).pending()
}

// isOpen is the verdict of the breaker for a volume. One that cannot be written on has no
// clock, so that nothing will be done for it: it must not use up for good what others may
// lose. Itself it counts in full, should it be writable after all.
func (t *term) isOpen(s snapshot) bool {
	var own []string
	if s.unwritable && t.awaits(s) {
		own = s.nodes
	}
	return t.ledger.judgeWith(s.now, own).open
}

// notePresence remembers that something is there that may be the node of a volume which is
// noted as one whose node is missing. Should that note outlive the presence because it
// could not be removed, it does not count for the next absence.
func (t *term) notePresence(s snapshot) {
	switch s.member.place {
	case placeElsewhere, placeOrphan:
		return
	}
	if s.volume.Annotations[t.c.policy.ann.missing] != "" {
		t.memory.change(s.volume.UID, func(r *remembered) { r.present = s.now })
	}
}

// look is the part of gather that only reads.
func (t *term) look(name string) snapshot {
	s := snapshot{now: time.Now()}
	pv, ok := t.volumes.Get(name)
	if !ok {
		return s
	}
	s.volume = pv
	key := t.index.topologyKey()
	values, local := localValues(pv, t.c.deps.Driver, key)
	if !local {
		return s
	}
	names := mergeNames(values, t.c.policy.ann.lostNodes(pv))
	s.former = t.index.formerly(values)
	candidates := mergeNames(names, slices.Concat(s.former, t.candidates(names)))
	known := t.cachedNodes(candidates)
	s.member = t.c.policy.ann.locate(pv, values, key, known, t.cachedCSINodes(candidates), s.former)
	if s.nodes, s.tombstone = t.index.lost(pv, values); len(s.member.hosts) > 0 {
		s.nodes = s.member.hosts
	}
	if node := t.c.departed.of(names, key); node != nil && t.c.departed.heeds(pv) {
		grave := tombstoneOf(node)
		grave.optedOut, s.tombstone = true, &grave
	}
	s.approved = t.approved(s.now).covers(s.nodes)
	say := map[string]metav1.Object{"PersistentVolume": pv}
	if node := t.c.policy.ann.refusal(s.member, known); node != nil {
		say["Node"], s.hostRefuses = node, true
	}
	if ref := pv.Spec.ClaimRef; ref != nil {
		if claim, ok := t.claims.Get(ref.Namespace + "/" + ref.Name); ok {
			s.claim = claim
			if claim.UID == ref.UID {
				say["PersistentVolumeClaim"] = claim
			}
		}
	}
	if class, ok := t.c.classes.Get(classOf(pv, s.claim)); ok {
		say["StorageClass"] = class
	}
	s.wishes = t.c.policy.ann.wishesOf(say)
	if s.tombstone != nil && s.tombstone.optedOut && s.wishes.optOut == "" {
		s.wishes.optOut = "Node " + s.tombstone.name
	}
	if s.wishes.optOut == "" {
		s.wishes.optOut = t.namespaces.optedOut(pv.Spec.ClaimRef)
	}
	if t.c.attachments != nil {
		for _, va := range t.c.attachments.ByIndex(kube.ByVolume, name) {
			s.attachments = append(s.attachments, va.Name)
		}
	}
	s.noticed, s.present = t.memory.noticed(pv.UID), t.memory.present(pv.UID)
	s.kept = t.memory.kept(pv.UID)
	s.forced, s.tried = t.memory.forced(pv.UID), t.memory.tried(pv.UID)
	s.unwritable = t.memory.unwritable(pv.UID) && pv.Annotations[t.c.policy.ann.missing] == "" && s.member.place != placeFenced
	return s
}

// candidates is the nodes that volumes with one of values may mean, as far as the caches tell.
func (t *term) candidates(values []string) []string {
	return mergeNames(t.index.nodesNamed(values), t.index.unlabelled())
}

func (t *term) cachedNodes(names []string) []*corev1.Node {
	var nodes []*corev1.Node
	for _, name := range names {
		if node, ok := t.c.nodes.Get(name); ok {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

func (t *term) cachedCSINodes(names []string) []*storagev1.CSINode {
	var found []*storagev1.CSINode
	for _, name := range names {
		if n, ok := t.c.csiNodes.Get(name); ok {
			found = append(found, n)
		}
	}
	return found
}

// approved is what the administrator has approved, as far as the cache knows.
func (t *term) approved(now time.Time) approval {
	if t.c.drivers == nil {
		return approval{}
	}
	driver, ok := t.c.drivers.Get(t.c.deps.Driver)
	if !ok {
		return approval{}
	}
	granted, err := t.c.policy.ann.parseApproval(driver.Annotations, now)
	if err != nil {
		t.c.notify.seldom(driver, err.Error(), warning(reasonSkipped, "%v", err))
	}
	return t.c.spent.from(granted)
}

// refresh is s as the API server says it is.
func (t *term) refresh(ctx context.Context, s snapshot, full bool) (snapshot, error) {
	var likely []string
	if full {
		likely = t.likelyReady()
	}
	live, err := t.reader.refresh(ctx, s, t.index.topologyKey(), t.candidates, t.everyNode, likely, full)
	if err != nil {
		return live, err
	}
	// What was read is newer than the cache, and what decides is not to be asked for twice.
	switch {
	case live.volume == nil:
		t.volumes.MarkDeleted(s.volume)
	default:
		t.volumes.Observe(live.volume)
		t.notePresence(live)
	}
	if s.claim != nil && live.noClaim == kube.Key(s.claim) {
		t.claims.MarkDeleted(s.claim)
	} else if live.claim != nil {
		t.claims.Observe(live.claim)
	}
	if live.volume != nil && live.namespace != "" {
		t.namespaces.note(live.volume.Spec.ClaimRef.Namespace, live.refused)
	}
	if live.volume != nil && live.member.place == s.member.place { // else the cache will follow, and is counted then
		t.ledger.correct(live.volume.Name, t.entryOf(live))
	}
	live.open = t.isOpen(live)
	return live, nil
}

// likelyReady is a few nodes that the cache takes for ready and for nodes of the driver.
func (t *term) likelyReady() []string {
	var likely []string
	for _, name := range t.index.driverNodes() { // in random order
		if node, ok := t.c.nodes.Get(name); ok && isReady(node) {
			if likely = append(likely, name); len(likely) == 3 {
				break
			}
		}
	}
	return likely
}

// claimsSelecting is the claims without a volume for which the scheduler chose a node, and
// those with one.
func (t *term) claimsSelecting(node string) (unbound, bound []*corev1.PersistentVolumeClaim) {
	for _, cached := range t.c.claims.ByIndex(kube.BySelectedNode, node) {
		claim, ok := t.claims.Get(kube.Key(cached))
		if !ok || claim.Annotations[storagehelpers.AnnSelectedNode] != node {
			continue
		}
		class, ok := t.c.classes.Get(storagehelpers.GetPersistentVolumeClaimClass(claim))
		switch {
		case !ok || class.Provisioner != t.c.deps.Driver || claim.DeletionTimestamp != nil:
		case claim.Spec.VolumeName == "":
			unbound = append(unbound, claim)
		default:
			bound = append(bound, claim)
		}
	}
	return unbound, bound
}

// wishesOfClaim is what the cache knows about who wants an unbound claim cleaned up.
func (t *term) wishesOfClaim(claim *corev1.PersistentVolumeClaim, node *corev1.Node) wishes {
	say := map[string]metav1.Object{"PersistentVolumeClaim": claim}
	if class, ok := t.c.classes.Get(storagehelpers.GetPersistentVolumeClaimClass(claim)); ok {
		say["StorageClass"] = class
	}
	if node != nil {
		say["Node"] = node
	}
	w := t.c.policy.ann.wishesOf(say)
	if w.optOut == "" {
		w.optOut = t.namespaces.optedOut(&corev1.ObjectReference{Namespace: claim.Namespace})
	}
	return w
}

// keyOfClaims is the entry of the ledger for the unbound claims of a node, keyOfRecords
// that for its custom resources. No volume has a slash in its name.
func keyOfClaims(node string) string  { return "claims/" + node }
func keyOfRecords(node string) string { return "records/" + node }

// nodeOfKey is the node of such a key; false for the name of a volume.
func nodeOfKey(key string) (string, bool) {
	_, node, ok := strings.Cut(key, "/")
	return node, ok
}

// noteClaims has the ledger know whether something is to be done for the unbound claims of
// a node that is gone or going.
func (t *term) noteClaims(node string) {
	if t.c.cfg.NodeCleanupUnbound == UnboundIgnore || !t.c.policy.writes() {
		return
	}
	found, exists := t.c.nodes.Get(node)
	var unbound []*corev1.PersistentVolumeClaim
	pending := false
	if !exists || found.DeletionTimestamp != nil {
		unbound, _ = t.claimsSelecting(node)
		for _, claim := range unbound {
			pending = pending || t.c.policy.outOfScope(t.wishesOfClaim(claim, found)) == ""
		}
	}
	if len(unbound) == 0 {
		t.ledger.drop(keyOfClaims(node))
		return
	}
	// What nobody wants cleaned up now may be opted in later: the review has to find it.
	t.noteWaiting(keyOfClaims(node), node, pending && !t.c.departed.optedOut(node))
}

// noteWaiting has the ledger know whether something of node is to be done that is no
// volume.
func (t *term) noteWaiting(key, node string, pending bool) {
	e := entry{nodes: []string{node}, pending: pending, place: placeTerminating}
	e.held = pending && t.ledger.holds(key) && !t.approved(time.Now()).covers(e.nodes)
	t.ledger.set(key, e)
}

// holdWaiting holds what waits under key if too many nodes are lost. On a volume a hold is
// written; this one lasts in memory, until the node is back, an approval, or the end of what
// waits.
func (t *term) holdWaiting(ctx context.Context, key string) {
	trips := func() bool {
		node, _ := nodeOfKey(key)
		return t.ledger.isPending(key) && !t.ledger.holds(key) && t.opens() && !t.approved(time.Now()).covers([]string{node})
	}
	if trips() {
		if t.askNamespaces(ctx); trips() {
			t.ledger.hold(key)
		}
	}
}

// opens is the verdict of the breaker just now.
func (t *term) opens() bool {
	v, _ := t.ledger.judge(time.Now())
	return v.open
}

// askNamespaces is for the moment before the first hold, which outlives its cause: nobody
// may have asked the namespaces since the nodes were lost, and one of them may want nothing
// done. What is held already is no question of numbers any more.
func (t *term) askNamespaces(ctx context.Context) {
	if _, held := t.ledger.judge(time.Now()); !held {
		t.readNamespaces(ctx)
		t.recount()
	}
}
