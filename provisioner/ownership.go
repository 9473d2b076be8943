// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// nodeOwnership decides when this instance of a distributed provisioner tries to win a claim with immediate binding, that
// is, to select its node for it. It tries one claim at a time:
//   - After a success, it pauses for a fifth of the base delay, so that the instances share the claims. An instance that is
//     alone pauses once.
//   - After a failure, it tries the next claim without a pause.
//
// A claim that is overdue by the base delay ignores the pause.
// Without the pause, a hundred instances would win three hundred claims within a second, with a conflict for every second one.
type nodeOwnership struct {
	c      *Controller
	claims *kube.TermCache[*corev1.PersistentVolumeClaim]

	mu        sync.Mutex
	races     map[claimKey]race
	competing int       // claims with a drawn delay
	trying    bool      // a claim is tried
	next      time.Time // end of the pause
	// hasWon and othersWon: this instance, and another one, has won a claim since this one has begun to compete.
	hasWon, othersWon bool
}

// race is the delay before this instance tries to win a claim.
type race struct {
	began time.Time // of the first race for the claim
	tries int       // without lasting success
	due   time.Time // of the next try, as drawn; zero: not drawn yet
	at    time.Time // of the next try; later than due while other claims are tried
}

// decideOwner returns the step for a claim for which this node is not selected, in distributed
// provisioning.
func (d driver) decideOwner(s claimState) step {
	switch r := s.race; {
	case kube.WaitsForFirstConsumer(s.class) || !d.NodeDeploymentImmediateBinding:
		return step{action: doForget, reason: "WaitsForNode"}
	case !d.allowedHere(s):
		return step{action: doForget, reason: "NotAllowedHere"}
	case r.due.IsZero():
		return step{action: doScheduleClaiming, reason: "NoOwner"}
	case s.now.Before(r.at):
		return step{action: doWait, reason: "NoOwner", until: r.at}
	}
	return step{action: doSelectThisNode, reason: "NoOwner"}
}

// allowedHere reports whether the class of the claim admits volumes on this node.
func (d driver) allowedHere(s claimState) bool {
	if !d.topology || len(s.class.AllowedTopologies) == 0 {
		return true
	}
	class, err := d.translated(s.class)
	if err != nil {
		return false
	}
	_, err = d.requirementFor(s.claim, class, d.NodeName, s.known)()
	return err == nil
}

func newNodeOwnership(c *Controller, claims *kube.TermCache[*corev1.PersistentVolumeClaim]) *nodeOwnership {
	return &nodeOwnership{c: c, claims: claims, races: map[claimKey]race{}}
}

const (
	// turnsPerDelay is the number of pauses within the base delay.
	turnsPerDelay = 5
	// claimsPerTurn is the average number of waiting claims that are reconciled per pause: enough to find one to try, and
	// few even if a thousand claims wait.
	claimsPerTurn = 8
)

func (o *nodeOwnership) pace() time.Duration { return o.c.cfg.NodeDeploymentBaseDelay / turnsPerDelay }

// claimDelay returns how long to wait before a try, counted from 0.
func (c Config) claimDelay(try int, random func(time.Duration) time.Duration) time.Duration {
	return max(workloop.Backoff(c.NodeDeploymentBaseDelay, c.NodeDeploymentMaxDelay, try)-random(c.NodeDeploymentBaseDelay), 0)
}

func randomDuration(below time.Duration) time.Duration {
	if below <= 0 {
		return 0
	}
	return rand.N(below)
}

func (o *nodeOwnership) raceOf(key claimKey) race {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.races[key]
}

// schedule draws the time at which this instance tries to win a claim. The first claim begins a pause of random length, so
// that the instances try at different times.
func (o *nodeOwnership) schedule(key claimKey) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.races[key]
	if r.began.IsZero() {
		r.began = time.Now()
	}
	if r.due.IsZero() {
		o.competing++
		if o.competing == 1 {
			o.notBefore(time.Now().Add(randomDuration(o.pace())))
		}
	}
	r.due = time.Now().Add(o.c.cfg.claimDelay(r.tries, randomDuration))
	r.at = r.due
	o.races[key] = r
}

// end ends the race for a claim until it is scheduled again. The caller holds mu.
func (o *nodeOwnership) end(key claimKey, tries int) {
	if !o.races[key].due.IsZero() {
		o.competing--
		if o.competing == 0 {
			o.hasWon, o.othersWon = false, false
		}
	}
	o.races[key] = race{began: o.races[key].began, tries: tries}
}

// failed counts a try that did not succeed, or whose claim was rescheduled.
func (o *nodeOwnership) failed(key claimKey) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.end(key, o.races[key].tries+1)
}

// succeeded keeps the tries until the claim is bound, or owned by another node: see failed.
func (o *nodeOwnership) succeeded(key claimKey) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.end(key, o.races[key].tries)
}

func (o *nodeOwnership) forget(key claimKey) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.end(key, 0)
	delete(o.races, key)
}

// claimUpdated records that another node has won a claim.
func (o *nodeOwnership) claimUpdated(old, claim *corev1.PersistentVolumeClaim) {
	node := selectedNode(claim)
	if !o.c.cfg.NodeDeployment || node == "" || node == o.c.cfg.NodeName || selectedNode(old) != "" {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.othersWon = o.othersWon || o.competing > 0
}

func (o *nodeOwnership) notBefore(next time.Time) {
	if next.After(o.next) {
		o.next = next
	}
}

// beginTry reports whether a claim may be tried now. If not, it schedules the next try.
func (o *nodeOwnership) beginTry(key claimKey, now time.Time) bool {
	cfg := o.c.cfg
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.races[key]
	overdue := !now.Before(r.due.Add(cfg.NodeDeploymentBaseDelay))
	if !o.trying && (overdue || !now.Before(o.next)) {
		o.trying = true
		return true
	}
	next, again := o.next, o.pace()*time.Duration(o.competing)/claimsPerTurn
	if next.Before(now) {
		next = now
	}
	again = min(max(again, o.pace()), cfg.NodeDeploymentBaseDelay)
	r.at = next.Add(randomDuration(again))
	o.races[key] = r
	return false
}

func (o *nodeOwnership) endTry(won bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.trying = false
	if !won || o.competing == 0 {
		return
	}
	// The first pause shows whether there are other instances.
	if o.othersWon || !o.hasWon {
		o.notBefore(time.Now().Add(o.pace()))
	}
	o.hasWon = true
}

// selectThisNode selects this node for a claim, if the node has enough capacity and
// the API server still has the claim that decide saw: that read costs less than a conflict.
func (o *nodeOwnership) selectThisNode(ctx context.Context, key claimKey, s claimState) error {
	if !o.beginTry(key, s.now) {
		return nil
	}
	won := false
	defer func() { o.endTry(won) }()
	if enough, err := o.hasCapacity(ctx, s); err != nil {
		// If the cause lasts, CreateVolume fails and sends an event.
		klog.FromContext(ctx).Error(err, "Checking the capacity of this node failed, selecting it anyway")
	} else if !enough {
		o.failed(key)
		return nil
	}
	live, exists, err := o.claims.Refetch(ctx, o.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace), s.claim)
	switch {
	case err != nil:
		return fmt.Errorf("reading claim %s before selecting this node: %w", key, err)
	case !exists, live.ResourceVersion != s.claim.ResourceVersion:
		return nil // decide has not seen this
	}
	node := kube.MetadataPatch{
		SetAnnotations: map[string]string{storagehelpers.AnnSelectedNode: o.c.cfg.NodeName},
		Tests:          map[string]any{"/metadata/resourceVersion": live.ResourceVersion},
	}
	_, err = o.claims.Patch(ctx, o.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace), live, node)
	switch {
	case kube.IsPatchTestFailed(err) || apierrors.IsConflict(err): // changed after the read
		o.c.metrics.conflicts.Inc()
		o.failed(key)
		return nil
	case err != nil:
		o.failed(key)
		err = fmt.Errorf("setting the selected node of claim %s: %w", key, err)
		if kube.IsRefused(err) { // a retry alone does not help
			o.c.claimFailed(live, failedEvent(storagehelpers.GetPersistentVolumeClaimClass(live), err))
		}
		return err
	}
	won = true
	o.succeeded(key)
	return nil
}

// hasCapacity asks the driver whether the volume of a claim fits on this node.
func (o *nodeOwnership) hasCapacity(ctx context.Context, s claimState) (bool, error) {
	d := o.c.driver
	size := capacityRange(s.claim).RequiredBytes
	if size == 0 || !d.caps.GetCapacity {
		return true, nil
	}
	class, err := d.translated(s.class)
	if err != nil {
		return false, err
	}
	next, err := d.prepare(s.claim, class, d.NodeName, nil, d.requirementFor(s.claim, class, d.NodeName, s.known))
	if err != nil {
		return false, err
	}
	topologies := next.request.GetAccessibilityRequirements().GetRequisite()
	if len(topologies) == 0 {
		topologies = []*csi.Topology{nil}
	}
	for _, topology := range topologies {
		call, cancel := context.WithTimeout(ctx, o.c.cfg.Timeout)
		response, err := o.c.deps.CSI.GetCapacity(call, &csi.GetCapacityRequest{
			VolumeCapabilities: next.request.VolumeCapabilities, Parameters: next.request.Parameters, AccessibleTopology: topology,
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
