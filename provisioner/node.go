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
	storagevolume "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// race is the wait of one instance of a node deployment before it tries to become
// the owner of a claim for which no node is selected.
type race struct {
	tries int       // that did not succeed so far
	at    time.Time // of the next one; zero: not drawn yet
	won   int       // claims that this instance had won when at was drawn
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
	case r.at.IsZero():
		return step{action: doRace, reason: "NoOwner"}, true
	case s.now.Before(r.at):
		return step{action: doWait, reason: "NoOwner", until: r.at}, true
	}
	return step{action: doOwn, reason: "NoOwner"}, true
}

// allowedHere tells whether a class admits volumes on this node.
func (d driver) allowedHere(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, known topologies) bool {
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

// handicapShare is the part of the base delay that each claim won puts this instance
// behind the others, so that claims spread evenly over the nodes; maxHandicap bounds it.
const (
	handicapShare = 20
	maxHandicap   = 20
)

// delayOf is how long to wait before try number tries. An instance that has won claims
// lately lets others go first.
func (d driver) delayOf(tries, won int, random func(time.Duration) time.Duration) time.Duration {
	delay := d.NodeDeploymentBaseDelay
	for range tries {
		if delay >= d.NodeDeploymentMaxDelay/2 {
			delay = d.NodeDeploymentMaxDelay
			break
		}
		delay *= 2
	}
	delay = min(delay, d.NodeDeploymentMaxDelay)
	delay = max(delay-random(d.NodeDeploymentBaseDelay), 0)
	return delay + d.NodeDeploymentBaseDelay/handicapShare*time.Duration(min(won, maxHandicap))
}

func randomDuration(below time.Duration) time.Duration {
	if below <= 0 {
		return 0
	}
	return rand.N(below)
}

// enterRace draws the time at which this instance tries to own a claim.
func (t *term) enterRace(key claimKey) {
	t.mu.Lock()
	won := t.won
	t.mu.Unlock()
	t.remember(key.UID, func(p *progress) {
		p.race.at, p.race.won = time.Now().Add(t.c.driver.delayOf(p.race.tries, won, randomDuration)), min(won, maxHandicap)
	})
}

// own makes this node the selected one of a claim, if it has room and no other was
// faster. The API server is asked whether one was: its answer costs less than a
// conflict.
func (t *term) own(ctx context.Context, key claimKey, s snapshot) error {
	again := func() { t.remember(key.UID, func(p *progress) { p.race = race{tries: p.race.tries + 1} }) }
	// An instance that has won others since it drew its time draws again.
	if t.behind(key) {
		return nil
	}
	if enough, err := t.hasRoom(ctx, s); err != nil {
		klog.FromContext(ctx).Info("Not known whether this node has room; trying to own the claim, so that its user sees why it fails", "err", err)
	} else if !enough {
		again()
		return nil
	}
	live, err := t.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && live.UID != key.UID {
		t.claims.Removed(s.claim)
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading claim %s/%s before owning it: %w", key.Namespace, key.Name, err)
	}
	if selectedNode(live) != "" || live.Spec.VolumeName != "" || live.DeletionTimestamp != nil {
		t.claims.Wrote(live)
		return nil
	}
	owned, err := t.selectThisNode(ctx, live)
	switch {
	case apierrors.IsConflict(err), apierrors.IsInvalid(err): // its resourceVersion is another by now
		t.c.metrics.conflicts.Inc()
		again()
		return nil
	case apierrors.IsNotFound(err):
		t.claims.Removed(live)
		return nil
	case err != nil:
		again()
		return fmt.Errorf("owning claim %s/%s: %w", key.Namespace, key.Name, err)
	}
	t.claims.Wrote(owned)
	t.mu.Lock()
	t.won++
	t.mu.Unlock()
	t.remember(key.UID, func(p *progress) { p.race = race{} })
	return nil
}

// behind puts off the try for a claim whose time was drawn when this instance had won
// fewer others.
func (t *term) behind(key claimKey) bool {
	t.mu.Lock()
	won := t.won
	t.mu.Unlock()
	behind := false
	t.remember(key.UID, func(p *progress) {
		if more := min(won, maxHandicap) - p.race.won; more > 0 {
			p.race.won += more
			p.race.at = p.race.at.Add(t.c.cfg.NodeDeploymentBaseDelay / handicapShare * time.Duration(more))
			behind = time.Now().Before(p.race.at)
		}
	})
	return behind
}

// selectThisNode writes the annotation, only if the claim is still what live is.
func (t *term) selectThisNode(ctx context.Context, live *corev1.PersistentVolumeClaim) (*corev1.PersistentVolumeClaim, error) {
	claims := t.c.deps.Client.CoreV1().PersistentVolumeClaims(live.Namespace)
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": live.UID, "resourceVersion": live.ResourceVersion, "annotations": map[string]string{kube.AnnSelectedNode: t.c.cfg.NodeName},
	}})
	if err != nil {
		return nil, err
	}
	owned, err := claims.Patch(ctx, live.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsForbidden(err) { // an old ClusterRole
		metav1.SetMetaDataAnnotation(&live.ObjectMeta, kube.AnnSelectedNode, t.c.cfg.NodeName)
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
	return storagevolume.CheckNodeAffinity(pv, d.segments) == nil
}
