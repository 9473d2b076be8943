package nodecontroller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// syncNode brings one node as far as it goes.
func (t *term) syncNode(ctx context.Context, name string) (next time.Time, err error) {
	defer func() { t.ledger.forbid("node/"+name, apierrors.IsForbidden(err)) }()
	log := klog.FromContext(ctx).WithValues("node", klog.KRef("", name))
	ctx = klog.NewContext(ctx, log)
	pass := &nodePass{name: name}
	for range maxRounds {
		t.holdWaiting(ctx, keyOfClaims(name))
		s := t.gatherNode(pass)
		t.announce(s.now)
		st := t.c.nodePolicy.decide(s)
		log.V(2).Info("Decided", "action", st.action.String(), "reason", st.reason)
		var err error
		switch st.action {
		case nodeNothing:
			if err = pass.err; err == nil || st.next.IsZero() || s.node.DeletionTimestamp == nil {
				return st.next, nil
			}
		case nodeAbsent:
			next, err := t.cleanAbsent(ctx, name)
			t.announce(time.Now()) // it may have been the last that was held
			return next, t.failedFor(name, err)
		case nodeProtect:
			return time.Time{}, t.failedFor(name, t.protect(ctx, s.node))
		case nodeNote:
			err = t.noteVolumes(ctx, s.node, pass, false)
			if err == nil {
				err = t.noteOptOut(ctx, pass)
			}
		case nodeHold:
			if !pass.asked { // and look again
				pass.asked = true
				t.askNamespaces(ctx)
				continue
			}
			err = t.noteVolumes(ctx, s.node, pass, true)
		case nodeClean:
			var next time.Time
			if next, err = t.cleanTerminating(ctx, s.node, pass); err == nil && !next.IsZero() {
				return earliest(next, s.node.DeletionTimestamp.Add(t.c.nodePolicy.timeout)), nil
			}
		case nodeRelease:
			if pass.err == nil || s.node.DeletionTimestamp == nil {
				return time.Time{}, t.failedFor(name, t.release(ctx, s.node, st))
			}
			err = pass.err // which may be over at the next attempt
		}
		if err == nil {
			continue
		}
		if end := s.node.DeletionTimestamp.Add(t.c.nodePolicy.timeout); time.Now().Before(end) {
			if !t.memory.has(t.memory.ends, name) { // the back-off may be longer than the node may be held
				t.memory.since(t.memory.ends, name, end)
				time.AfterFunc(time.Until(end), func() { t.nodeQueue.Add(name) })
			}
			return time.Time{}, t.failedFor(name, err)
		}
		log.Info("The clean-up failed, and the node has waited long enough", "err", err)
		return time.Time{}, t.failedFor(name, t.release(ctx, s.node, t.c.nodePolicy.timedOut()))
	}
	return time.Time{}, fmt.Errorf("node %q is not settled after %d steps", name, maxRounds)
}

// nodePass is what one sync of a node has found and done.
type nodePass struct {
	name    string
	volumes []snapshot // of which it is a host or alias
	// meant is the volumes that may be of a node that goes and has opted out, while nobody
	// knows by which key they name their nodes, and that do not say so yet.
	meant   []*corev1.PersistentVolume
	cleaned bool
	blocked string
	asked   bool // the namespaces, before the first hold
	// settled is the volumes and claims that were dealt with in this sync.
	settled map[string]bool
	// refused is the volumes that could not be written on in this sync, and err why: they
	// keep nothing else from being done, and the node until its timeout.
	refused map[string]bool
	err     error
}

// refuse notes that a volume could not be written on. Where the API server did not even
// answer, the error is returned: the others would take as long, and come first another time.
func (p *nodePass) refuse(volume string, err error) error {
	if !isAnswer(err) {
		return err
	}
	if p.refused == nil {
		p.refused = map[string]bool{}
	}
	p.refused[volume], p.err = true, errors.Join(p.err, err)
	return nil
}

// gatherNode reads the caches about a node and its volumes.
func (t *term) gatherNode(pass *nodePass) nodeSnapshot {
	s := nodeSnapshot{now: time.Now(), registered: t.index.hasDriver(pass.name), keyKnown: t.index.topologyKey() != "", cleaned: pass.cleaned, blocked: pass.blocked}
	node, ok := t.nodes.Get(pass.name)
	if !ok {
		return s
	}
	s.node = node
	t.memory.clear(t.memory.absent, pass.name)
	pass.volumes, pass.meant = nil, nil
	for _, name := range t.index.volumesOf(pass.name) {
		vs, _ := t.gather(name)
		if vs.volume == nil || !slices.Contains(vs.member.hosts, node.Name) && !slices.Contains(vs.member.aliases, node.Name) {
			continue
		}
		s.volumes++
		pass.volumes = append(pass.volumes, vs)
		if vs.member.place != placeTerminating || pass.refused[name] {
			continue
		}
		s.unnoted = s.unnoted || !t.c.nodePolicy.notes(node, vs, false).AppliedTo(vs.volume)
		if t.c.policy.goal(vs).pending() {
			s.pending = true
			s.unheld = s.unheld || !t.c.nodePolicy.notes(node, vs, true).AppliedTo(vs.volume)
		}
	}
	if !s.keyKnown && !s.registered {
		s.mentioned = len(t.index.mentioning(ownValues(node))) > 0
	}
	if node.DeletionTimestamp != nil && node.Annotations[t.c.policy.ann.cleanup] == disabled && !s.keyKnown {
		for _, name := range t.index.mentioning(t.index.meansOf(node)) {
			if pv, ok := t.volumes.Get(name); ok && pv.Annotations[t.c.policy.ann.cleanup] != disabled && !pass.refused[name] {
				s.unnoted, pass.meant = true, append(pass.meant, pv)
			}
		}
	}
	t.noteClaims(node.Name)
	s.pending = s.pending || t.ledger.isPending(keyOfClaims(node.Name))
	var own []string
	if s.pending { // also where its volumes do not count, see [term.isOpen]
		own = []string{node.Name}
	}
	s.open, s.approved = t.ledger.judgeWith(s.now, own).open, t.approved(s.now).covers([]string{node.Name})
	switch {
	case s.registered:
		t.memory.clear(t.memory.alone, node.Name)
	case t.c.nodePolicy.mode == NodeFinalizerManage:
		s.unregistered = t.memory.since(t.memory.alone, node.Name, s.now)
	}
	return s
}

// notes is what a volume has to know of its node when that is gone. An opt-out has to
// outlive the node.
func (p nodePolicy) notes(node *corev1.Node, s snapshot, hold bool) kube.MetadataPatch {
	names := mergeNames(p.ann.lostNodes(s.volume), s.member.hosts) // one that has gone before is lost as well
	set := map[string]string{p.ann.lostNode: strings.Join(names, nodeListMark), p.ann.lostNodeUID: string(node.UID)}
	if len(names) > 1 { // the UID of which, nobody could tell
		delete(set, p.ann.lostNodeUID)
	} else if machine := machineOf(node); machine != "" {
		set[p.ann.lostMachine] = machine
	}
	if node.Annotations[p.ann.cleanup] == disabled || s.hostRefuses {
		set[p.ann.cleanup] = disabled
	}
	if hold {
		set[p.ann.hold] = heldByBreak
	}
	return kube.MetadataPatch{SetAnnotations: set}
}

// noteVolumes writes on the volumes of a node that it goes, or that they have to wait.
func (t *term) noteVolumes(ctx context.Context, node *corev1.Node, pass *nodePass, hold bool) error {
	shuffle(pass.volumes)
	for _, s := range pass.volumes {
		if s.member.place != placeTerminating || pass.refused[s.volume.Name] || hold && !t.c.policy.goal(s).pending() {
			continue
		}
		if err := t.noteFor(ctx, pass, s.volume, t.c.nodePolicy.notes(node, s, hold)); err != nil {
			return err
		}
	}
	return nil
}

// noteFor writes on one volume of a node.
func (t *term) noteFor(ctx context.Context, pass *nodePass, pv *corev1.PersistentVolume, change kube.MetadataPatch) error {
	if err := t.write(ctx, pv, change); err != nil {
		return pass.refuse(pv.Name, t.failed(pv, err))
	}
	return nil
}

// noteOptOut writes on volumes that their node has opted out: it has to outlive the node.
func (t *term) noteOptOut(ctx context.Context, pass *nodePass) error {
	shuffle(pass.meant)
	for _, pv := range pass.meant {
		if err := t.noteFor(ctx, pass, pv, kube.MetadataPatch{SetAnnotations: map[string]string{t.c.policy.ann.cleanup: disabled}}); err != nil {
			return err
		}
	}
	return nil
}

// protect adds the finalizer to a node of the driver.
func (t *term) protect(ctx context.Context, node *corev1.Node) error {
	err := t.changeNode(ctx, node, kube.MetadataPatch{AddFinalizers: []string{t.c.nodePolicy.finalizer}})
	if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) {
		live, exists, e := t.reader.node(ctx, node.Name)
		if e == nil && (!exists || live.DeletionTimestamp != nil) {
			return nil // deleted meanwhile: too late to ask for anything
		}
	}
	return err
}

// release removes the finalizer of a node, and tells why where that is not clear.
func (t *term) release(ctx context.Context, node *corev1.Node, st nodeStep) error {
	if err := t.changeNode(ctx, node, t.c.nodePolicy.releases()); err != nil {
		return err
	}
	if st.event != "" {
		t.c.notify.send(node, warning(st.event, "%s", st.message))
	}
	if deleted := node.DeletionTimestamp; deleted != nil {
		t.c.metrics.held(deleted.Time)
	}
	klog.FromContext(ctx).Info("Node let go", "reason", st.reason)
	return nil
}

func (t *term) changeNode(ctx context.Context, node *corev1.Node, change kube.MetadataPatch) error {
	ctx, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
	defer cancel()
	if _, err := t.nodes.Patch(ctx, t.c.deps.Client.CoreV1().Nodes(), node, change); err != nil {
		return fmt.Errorf("writing finalizer %s of Node %q: %w", t.c.nodePolicy.finalizer, node.Name, err)
	}
	return nil
}

// failedFor is [term.failed] for a node, which may be gone.
func (t *term) failedFor(name string, err error) error {
	if err == nil {
		return nil
	}
	node, ok := t.nodes.Get(name)
	if !ok { // nobody finds what is told of a node that is gone
		return t.failed(t.csiDriver(), err)
	}
	return t.failed(node, err)
}
