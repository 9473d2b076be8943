package provisioner

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
)

// race is the wait of one instance of a node deployment before it tries to become
// the owner of a claim for which no node is selected.
type race struct {
	tries int       // that did not succeed so far, or not for good
	due   time.Time // of the next one, as it was drawn; zero: not drawn yet
	at    time.Time // of the next one; later than due while other claims have their turn
}

// decideOwner tells whether a claim is for this node; settled is false when it is.
func (d driver) decideOwner(s snapshot) (st step, settled bool) {
	node := selectedNode(s.claim)
	switch r := s.progress.race; {
	case node == d.NodeName:
		return step{}, false
	case node != "":
		return step{action: doForget, reason: "OfAnotherNode"}, true
	case isLate(s.class) || !d.NodeDeploymentImmediateBinding:
		return step{action: doForget, reason: "WaitsForNode"}, true
	case !d.allowedHere(s.claim, s.class, s.known):
		return step{action: doForget, reason: "NotAllowedHere"}, true
	case r.due.IsZero():
		return step{action: doRace, reason: "NoOwner"}, true
	case s.now.Before(r.at):
		return step{action: doWait, reason: "NoOwner", until: r.at}, true
	}
	return step{action: doOwn, reason: "NoOwner"}, true
}

// allowedHere tells whether a class admits volumes on this node.
func (d driver) allowedHere(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, known *topology.Aggregate) bool {
	if !d.topology || len(class.AllowedTopologies) == 0 {
		return true
	}
	translated, err := d.translated(class)
	if err != nil {
		return false
	}
	_, err = requirement(topologyRequest{strict: d.StrictTopology, allowed: translated.AllowedTopologies, node: d.NodeName, claim: claim.Name}, known)
	return err == nil
}

// delayOf is how long to wait before try number tries, counted from 0.
func (d driver) delayOf(tries int, random func(time.Duration) time.Duration) time.Duration {
	delay := d.NodeDeploymentBaseDelay
	for range tries {
		if delay >= d.NodeDeploymentMaxDelay/2 {
			delay = d.NodeDeploymentMaxDelay
			break
		}
		delay *= 2
	}
	delay = min(delay, d.NodeDeploymentMaxDelay)
	return max(delay-random(d.NodeDeploymentBaseDelay), 0)
}

func randomDuration(below time.Duration) time.Duration {
	if below <= 0 {
		return 0
	}
	return rand.N(below)
}

// enterRace draws the time at which this instance tries to own a claim.
func (t *term) enterRace(key claimKey) {
	t.remember(key.UID, func(p *progress) {
		p.race.due = time.Now().Add(t.c.driver.delayOf(p.race.tries, randomDuration))
		p.race.at = p.race.due
	})
}

// turnsPerDelay is how many claims an instance tries to own within the base delay.
const turnsPerDelay = 5

// looksPerTurn is how many of the claims that wait are looked at in the time of a
// turn, so that one is found soon and a thousand claims do not all ask in each turn.
const looksPerTurn = 8

// turns let the instances of a node deployment, which know nothing of one another,
// share many claims that come at once: each tries to own one claim at a time, and
// the next one only a fifth of the base delay after it has won one. So all win about
// equally many, and they seldom reach for the same claim at the same time: were each
// claim tried when its own time has come, a hundred instances would own three hundred
// claims within a second, and get in one another's way for every other of them.
//
// An instance that did not win has the next turn at once: it is behind the others. One
// that has won more than the others, as everybody can see by the claims, lets them
// go first. The pause ends for a claim that was put off for the base delay, so that
// few instances are not slow with many claims, and everything for one that was put
// off for the longest delay.
type turns struct {
	claims int            // for which this instance competes
	taken  bool           // for one that is being tried just now
	next   time.Time      // no other before
	won    map[string]int // claims by node, since this instance has begun to compete
}

// wins counts a claim that node has won.
func (t *turns) wins(node string) {
	if t.claims == 0 {
		return
	}
	if t.won == nil {
		t.won = map[string]int{}
	}
	t.won[node]++
}

// ahead tells whether node has won more than the nodes that have won any, on average.
func (t *turns) ahead(node string) bool {
	own, total, nodes := t.won[node], 0, len(t.won)
	for _, n := range t.won {
		total += n
	}
	return 2*own*nodes > 2*total+nodes // by more than half a claim
}

func (d driver) pace() time.Duration { return d.NodeDeploymentBaseDelay / turnsPerDelay }

// competes counts the claims for which this instance competes; the caller holds mu.
// It begins with the first at a random time, so as not to keep step with the others.
func (t *term) competes(before, after race) {
	switch {
	case before.due.IsZero() && !after.due.IsZero():
		if t.turns.claims++; t.turns.claims == 1 {
			t.turns.notBefore(time.Now().Add(randomDuration(t.c.driver.pace())))
		}
	case !before.due.IsZero() && after.due.IsZero():
		if t.turns.claims--; t.turns.claims == 0 {
			t.turns.won = nil
		}
	}
}

// ownedElsewhere notes that another node has won a claim.
func (t *term) ownedElsewhere(old, claim *corev1.PersistentVolumeClaim) {
	node := selectedNode(claim)
	if !t.c.cfg.NodeDeployment || node == "" || node == t.c.cfg.NodeName || selectedNode(old) != "" {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.turns.wins(node)
}

func (t *turns) notBefore(next time.Time) {
	if next.After(t.next) {
		t.next = next
	}
}

// takeTurn tells whether a claim may be tried now; else it puts that off.
func (t *term) takeTurn(key claimKey, s snapshot) bool {
	d := t.c.driver
	t.mu.Lock()
	waited := func(delay time.Duration) bool { return !s.now.Before(s.progress.race.due.Add(delay)) }
	turn := waited(d.NodeDeploymentBaseDelay) || !s.now.Before(t.turns.next)
	mine := !t.turns.taken && (turn && !t.turns.ahead(d.NodeName) || waited(d.NodeDeploymentMaxDelay))
	if mine {
		t.turns.taken = true
	}
	next, again := t.turns.next, d.pace()*time.Duration(t.turns.claims)/looksPerTurn
	t.mu.Unlock()
	if mine {
		return true
	}
	if next.Before(s.now) {
		next = s.now
	}
	again = min(max(again, d.pace()), d.NodeDeploymentBaseDelay)
	t.remember(key.UID, func(p *progress) { p.race.at = next.Add(randomDuration(again)) })
	return false
}

func (t *term) endTurn(won bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.turns.taken = false
	if !won {
		return
	}
	t.turns.wins(t.c.cfg.NodeName)
	// The first pause shows whether there are others at all.
	if len(t.turns.won) > 1 || t.turns.won[t.c.cfg.NodeName] == 1 {
		t.turns.notBefore(time.Now().Add(t.c.driver.pace()))
	}
}

// own makes this node the selected one of a claim, if it has room and no other was
// faster. The API server is asked whether one was: its answer costs less than a
// conflict.
func (t *term) own(ctx context.Context, key claimKey, s snapshot) error {
	if !t.takeTurn(key, s) {
		return nil
	}
	won := false
	defer func() { t.endTurn(won) }()
	again := func() { t.remember(key.UID, func(p *progress) { p.race = race{tries: p.race.tries + 1} }) }
	if enough, err := t.hasRoom(ctx, s); err != nil {
		klog.FromContext(ctx).Info("Not known whether this node has room; trying to own the claim, so that its user sees why it fails", "err", err)
	} else if !enough {
		again()
		return nil
	}
	live, err := t.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if kube.IsNotFound(err) || err == nil && live.UID != key.UID {
		t.claims.MarkDeleted(s.claim)
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading claim %s/%s before owning it: %w", key.Namespace, key.Name, err)
	}
	t.claims.Observe(live)
	if t.c.driver.decide(t.gather(key)).action != doOwn {
		return nil // the next round sees why not
	}
	owned, err := t.selectThisNode(ctx, live)
	switch {
	case apierrors.IsConflict(err): // its resourceVersion is another by now
		t.c.metrics.conflicts.Inc()
		again()
		return nil
	case kube.IsNotFound(err):
		t.claims.MarkDeleted(live)
		return nil
	case err != nil:
		again()
		err = fmt.Errorf("owning claim %s/%s: %w", key.Namespace, key.Name, err)
		if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) { // a policy or a permission: nothing that passes by itself
			t.failed(live, failedEvent(storagehelpers.GetPersistentVolumeClaimClass(live), err))
		}
		return err
	}
	won = true
	t.claims.Observe(owned)
	// The tries count until the claim is bound, or another's: see reschedule.
	t.remember(key.UID, func(p *progress) { p.race = race{tries: p.race.tries} })
	return nil
}

// selectThisNode writes the annotation, only if the claim is still what live is.
func (t *term) selectThisNode(ctx context.Context, live *corev1.PersistentVolumeClaim) (*corev1.PersistentVolumeClaim, error) {
	claims := t.c.deps.Client.CoreV1().PersistentVolumeClaims(live.Namespace)
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": live.UID, "resourceVersion": live.ResourceVersion, "annotations": map[string]string{storagehelpers.AnnSelectedNode: t.c.cfg.NodeName},
	}})
	if err != nil {
		return nil, err
	}
	owned, err := claims.Patch(ctx, live.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsForbidden(err) { // an old ClusterRole
		metav1.SetMetaDataAnnotation(&live.ObjectMeta, storagehelpers.AnnSelectedNode, t.c.cfg.NodeName)
		owned, err = claims.Update(ctx, live, metav1.UpdateOptions{})
	}
	return owned, err
}

// hasRoom asks the driver whether the volume of a claim fits on this node.
func (t *term) hasRoom(ctx context.Context, s snapshot) (bool, error) {
	d := t.c.driver
	size := capacityRange(s.claim).RequiredBytes
	if size == 0 || !d.getsCapacity {
		return true, nil
	}
	class, err := d.translated(s.class)
	if err != nil {
		return false, err
	}
	request, _, err := d.prepare(s.claim, class, d.NodeName, nil, d.requirementFor(s.claim, class, d.NodeName, s.known))
	if err != nil {
		return false, err
	}
	topologies := request.GetAccessibilityRequirements().GetRequisite()
	if len(topologies) == 0 {
		topologies = []*csi.Topology{nil}
	}
	for _, topology := range topologies {
		call, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
		response, err := t.c.deps.CSI.GetCapacity(call, &csi.GetCapacityRequest{
			VolumeCapabilities: request.VolumeCapabilities, Parameters: request.Parameters, AccessibleTopology: topology,
		})
		cancel()
		if err != nil {
			return false, err
		}
		if response.GetAvailableCapacity() >= size {
			return true, nil
		}
	}
	return false, nil
}

// reaches tells whether a volume is one of this node. Every instance looks after
// volumes that say nothing of where they are.
func (d driver) reaches(pv *corev1.PersistentVolume) bool {
	if !d.NodeDeployment || len(d.segments) == 0 {
		return true
	}
	if translated, err := d.asCSI(pv); err == nil { // topology keys are translated too
		pv = translated
	}
	return storagehelpers.CheckNodeAffinity(pv, d.segments) == nil
}
