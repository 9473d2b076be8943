package provisioner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tracing"
)

// maxRounds bounds the steps of one sync. A claim takes up to ten.
const maxRounds = 16

// slowAttempt is when an attempt is worth an event that tells of its begin.
const slowAttempt = time.Second

// syncClaim brings one claim as far as it goes.
func (t *term) syncClaim(ctx context.Context, key claimKey) (time.Time, error) {
	log := klog.FromContext(ctx).WithValues("persistentVolumeClaim", klog.KRef(key.Namespace, key.Name))
	ctx = tracing.WithOperation(klog.NewContext(ctx, log), "Provision", key.UID)
	var named *found // read anew in every sync
	for range maxRounds {
		s := t.gather(key)
		s.named = named
		step := t.c.driver.decide(s)
		log.V(2).Info("Decided", "action", step.action.String(), "reason", step.reason)
		switch step.action {
		case doLookUp:
			named = t.lookUp(ctx, s.claim, isProtected(s.claim))
			continue
		case doNothing:
			return time.Time{}, nil
		case doForget:
			t.forget(key.UID)
			return time.Time{}, nil
		case doIgnore:
			t.forget(key.UID)
			t.tell(s.claim, populatorEvent(step.err))
			return time.Time{}, nil
		case doWait:
			return step.until, nil
		}
		traced, end := tracing.StartSpan(ctx, step.action.String())
		err := t.apply(traced, key, s, step)
		end(err)
		if err != nil {
			return time.Time{}, err
		}
	}
	return time.Time{}, fmt.Errorf("claim %s/%s is not settled after %d steps", key.Namespace, key.Name, maxRounds)
}

// apply does what decide chose. An error means that the claim is tried again after
// its back-off; the user was told then, where it concerns the user.
func (t *term) apply(ctx context.Context, key claimKey, s snapshot, step step) error {
	a := s.progress.attempt
	switch step.action {
	case doRetry:
		t.c.metrics.claimFailed(s.claim)
		return step.err
	case doFail:
		return t.failBefore(key, s, step.err)
	case doRace:
		t.enterRace(key)
		return nil
	case doOwn:
		return t.own(ctx, key, s)
	case doReschedule:
		t.failed(s.claim, failedEvent(storagehelpers.GetPersistentVolumeClaimClass(s.claim), step.err))
		return t.reschedule(ctx, s.claim)
	case doStart:
		t.start(key, step.attempt)
		return nil
	case doGuard:
		if err := t.guard(ctx, key, s.named, step.attempt); err != nil {
			return t.failBefore(key, s, err)
		}
		return nil
	case doDrop: // the claim may have been protected for it
		t.remember(key.UID, func(p *progress) { p.attempt, p.settled = nil, true })
		return nil
	case doAskAgain:
		return t.askAgain(ctx, key, s.claim)
	case doReadSecrets:
		return t.readSecrets(ctx, key, a)
	case doProtect:
		return t.protect(ctx, key, s.claim, a)
	case doUnprotect:
		return t.unprotect(ctx, s.claim)
	case doCreate:
		return t.create(ctx, key, s, a)
	case doSave:
		return t.save(ctx, key, a)
	case doCleanUp:
		return t.cleanUp(ctx, key, a)
	}
	return fmt.Errorf("action %v has no implementation", step.action)
}

func (t *term) start(key claimKey, a *attempt) {
	t.remember(key.UID, func(p *progress) { p.attempt, p.settled, p.stuck = a, false, 0 })
}

// failed counts a failure and tells the user.
func (t *term) failed(claim *corev1.PersistentVolumeClaim, e event) {
	t.c.metrics.claimFailed(claim)
	t.tell(claim, e)
}

// failBefore is a failure before the driver was asked anything.
func (t *term) failBefore(key claimKey, s snapshot, err error) error {
	if errors.Is(err, errTopology) {
		t.remember(key.UID, func(p *progress) { p.stuck++ })
		// A claim with a selected node waits for that one, see nodeChanged. Woken by all
		// the others, it would soon have failed so often that the node is given back.
		if s.claim.Annotations[storagehelpers.AnnSelectedNode] == "" {
			t.mu.Lock()
			t.placeless[key] = struct{}{}
			t.mu.Unlock()
		}
	}
	t.failed(s.claim, failedEvent(storagehelpers.GetPersistentVolumeClaimClass(s.claim), err))
	return err
}

// readSecrets reads the secret of an attempt. Its values live no longer than it.
func (t *term) readSecrets(ctx context.Context, key claimKey, a *attempt) error {
	values, err := kube.ReadSecret(ctx, t.c.deps.Client, a.plan.Secrets.Provisioner)
	if err != nil {
		if a.doubt {
			err = fmt.Errorf("%w; a volume may be coming into being for this claim, and the driver cannot be asked about it without the secret. Create it again, or, if the driver has no volume %q, remove the finalizer %s",
				err, a.plan.VolumeName, claimFinalizer)
		} else { // nothing was asked yet: start anew when the secret, or the class, is mended
			t.remember(key.UID, func(p *progress) { p.attempt, p.settled = nil, true })
		}
		t.failed(a.claim, failedEvent(a.plan.ClassName, err))
		return err
	}
	t.change(key, a, withSecrets(values))
	return nil
}

// withSecrets leaves the request of others as it is.
func withSecrets(values map[string]string) func(*attempt) {
	return func(a *attempt) {
		a.request = proto.CloneOf(a.request)
		a.request.Secrets = values
	}
}

// refreshSecrets reads the secret of an attempt in doubt again: what is wrong with it may
// be why the driver does not answer. If it is gone, its last values are used.
func (t *term) refreshSecrets(ctx context.Context, key claimKey, a *attempt) *attempt {
	if !a.doubt || a.plan.Secrets.Provisioner == nil {
		return a
	}
	values, err := kube.ReadSecret(ctx, t.c.deps.Client, a.plan.Secrets.Provisioner)
	if err != nil || maps.Equal(values, a.request.Secrets) {
		return a
	}
	return t.change(key, a, withSecrets(values))
}

// change replaces the attempt of a claim by one that differs: what others have
// gathered of it stays as it was.
func (t *term) change(key claimKey, a *attempt, change func(*attempt)) *attempt {
	next := *a
	change(&next)
	t.remember(key.UID, func(p *progress) { p.attempt = &next })
	return &next
}

// protect notes an attempt on its claim. When that fails, an attempt in doubt goes on all
// the same: its outcome is what ends the doubt.
func (t *term) protect(ctx context.Context, key claimKey, claim *corev1.PersistentVolumeClaim, a *attempt) error {
	change, err := a.protection(t.c.driver.name)
	if err == nil {
		client := t.c.deps.Client
		if a.doubt {
			client = t.c.deps.UnthrottledClient
		}
		err = t.changeClaimBy(ctx, client, claim, change)
	}
	if err == nil {
		return nil
	}
	err = fmt.Errorf("noting on the claim that its volume may be coming into being: %w", err)
	if !apierrors.IsInvalid(err) { // being deleted, as the cache does not show yet: no finalizer can be added any more
		t.failed(claim, failedEvent(a.plan.ClassName, err))
	}
	if !a.doubt {
		return err
	}
	klog.FromContext(ctx).Info("The claim is not protected", "err", err)
	t.change(key, a, func(a *attempt) { a.unnoted = true })
	return nil
}

// askAgain is for a claim whose volume was saved and has gone since. The cache may not
// know yet that the claim was bound, or deleted, meanwhile.
func (t *term) askAgain(ctx context.Context, key claimKey, claim *corev1.PersistentVolumeClaim) error {
	live, err := t.c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err), err == nil && live.UID != key.UID:
		t.claims.MarkDeleted(claim)
		return nil
	case err != nil:
		return fmt.Errorf("reading claim %s/%s, whose volume is gone: %w", key.Namespace, key.Name, err)
	}
	t.claims.Observe(live)
	t.remember(key.UID, func(p *progress) { p.lost, p.saved = false, live.Spec.VolumeName != "" })
	return nil
}

func (t *term) unprotect(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if err := t.changeClaim(ctx, claim, unprotection); err != nil {
		return fmt.Errorf("removing the finalizer %s from claim %s/%s: %w", claimFinalizer, claim.Namespace, claim.Name, err)
	}
	t.remember(claim.UID, func(p *progress) { p.settled = false })
	return nil
}

// reschedule has the scheduler choose another node.
func (t *term) reschedule(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if err := t.changeClaim(ctx, claim, kube.MetadataPatch{RemoveAnnotations: []string{storagehelpers.AnnSelectedNode}}); err != nil {
		return fmt.Errorf("asking for another node for claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	// Where nodes compete for the claim, those that have not failed go first.
	t.remember(claim.UID, func(p *progress) { p.race = race{tries: p.race.tries + 1} })
	return nil
}

// changeClaim writes metadata of a claim. That it is gone is no error.
func (t *term) changeClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim, change kube.MetadataPatch) error {
	return t.changeClaimBy(ctx, t.c.deps.Client, claim, change)
}

func (t *term) changeClaimBy(ctx context.Context, client kubernetes.Interface, claim *corev1.PersistentVolumeClaim, change kube.MetadataPatch) error {
	changed, err := kube.PatchMetadata(ctx, client.CoreV1().PersistentVolumeClaims(claim.Namespace), claim, change)
	return t.claims.RecordWrite(claim, changed, err)
}

// create asks the driver for the volume of an attempt.
func (t *term) create(ctx context.Context, key claimKey, s snapshot, a *attempt) error {
	a = t.refreshSecrets(ctx, key, a)
	if !a.asked {
		a = t.change(key, a, func(a *attempt) { a.asked = true })
	}
	slow := time.AfterFunc(slowAttempt, func() { t.announce(key, a) })
	defer slow.Stop()
	call, cancel := context.WithTimeout(csiclient.WithMigrated(ctx, a.plan.Migrated), t.c.cfg.Timeout)
	defer cancel()
	response, err := t.c.deps.CSI.CreateVolume(call, a.request)
	if err != nil && t.c.deps.VolumeObserver != nil {
		t.c.deps.VolumeObserver.VolumeNotProvisioned(a.plan.ClassName)
	}
	switch {
	case err != nil && csiclient.OutcomeOf(err) == csiclient.Indeterminate:
		return t.inDoubt(ctx, key, a, err)
	case err != nil:
		return t.settled(ctx, key, s, a, err)
	}
	klog.FromContext(ctx).V(3).Info("Volume created", "volume", response.GetVolume())
	volume := response.GetVolume()
	err = checkVolume(a.request, volume)
	var pv *corev1.PersistentVolume
	if err == nil {
		if pv, err = t.c.driver.volumeOf(a.claim, a.request, a.plan, volume); err != nil {
			err = fmt.Errorf("%w: %w", errUnusable, err)
		}
	}
	switch {
	case errors.Is(err, errUnusable):
		t.change(key, a, func(a *attempt) {
			a.doubt, a.waste, a.place, a.wasteful = true, volume.GetVolumeId(), affinity(volume.GetAccessibleTopology()), err
		})
		return nil
	case err != nil:
		return t.inDoubt(ctx, key, a, err)
	}
	t.change(key, a, func(a *attempt) { a.volume, a.handle = pv, volume.GetVolumeId() })
	return nil
}

// announce tells that provisioning goes on, once per claim.
func (t *term) announce(key claimKey, a *attempt) {
	announced := true
	t.remember(key.UID, func(p *progress) { announced, p.announced = p.announced, true })
	if !announced {
		t.tell(a.claim, provisioningEvent(a.claim))
	}
}

// inDoubt is the end of a call after which a volume may exist, now or later. The
// claim is protected at once: the process may die during the back-off. That is done
// also when the call ended because this process is to stop, or has lost its Lease: the
// note is for whoever comes after.
func (t *term) inDoubt(ctx context.Context, key claimKey, a *attempt, err error) error {
	t.announce(key, a)
	t.failed(a.claim, failedEvent(a.plan.ClassName, err))
	t.change(key, a, func(a *attempt) { a.doubt, a.unnoted = true, false })
	next := t.gather(key)
	if t.c.driver.decide(next).action == doProtect {
		note, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiGrace)
		defer cancel()
		if e := t.protect(note, key, next.claim, next.progress.attempt); e != nil {
			return e
		}
	}
	return err
}

// settled is the end of a call after which no volume exists and none will.
func (t *term) settled(ctx context.Context, key claimKey, s snapshot, a *attempt, err error) error {
	t.announce(key, a)
	t.remember(key.UID, func(p *progress) { p.attempt, p.settled = nil, true })
	e, delay := failedEvent(a.plan.ClassName, err), t.c.cfg.RetryIntervalMax
	invalid := status.Code(err) == codes.InvalidArgument && s.claim != nil && s.class != nil
	if invalid {
		e = infeasibleEvent(a.plan.ClassName, delay, err)
		t.remember(key.UID, func(p *progress) {
			p.infeasible = &infeasible{
				until: time.Now().Add(delay), classUID: s.class.UID, classVersion: s.class.ResourceVersion,
				requestedBytes: capacityRange(s.claim).RequiredBytes, attributes: ptr.Deref(s.claim.Spec.VolumeAttributesClassName, ""),
			}
		})
	}
	t.failed(a.claim, e)
	now := t.gather(key)
	if now.claim == nil {
		return nil // nobody wants it any more
	}
	if isProtected(now.claim) {
		if e := t.unprotect(ctx, now.claim); e != nil {
			return e
		}
		now = t.gather(key)
	}
	switch full := status.Code(err) == codes.ResourceExhausted && t.c.driver.topology && a.plan.SelectedNode != ""; {
	case now.claim == nil, invalid: // the next round waits for the end of the delay
		return nil
	case full && now.claim.Annotations[storagehelpers.AnnSelectedNode] == a.plan.SelectedNode:
		return t.reschedule(ctx, now.claim)
	}
	return err
}
