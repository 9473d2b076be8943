package nodecontroller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// ErrRefused is what [Cleanup] returns when it does not do, or not all of, what it was
// asked for because that may not be done.
var ErrRefused = errors.New("refused")

// CleanupRequest is what an administrator asks for.
type CleanupRequest struct {
	Driver  string
	Node    string        // which must not exist
	Volumes bool          // remove the volumes too, once their claims are gone
	DryRun  bool          // have the API server try every deletion without effect
	Yes     bool          // without it and without DryRun, the plan is all
	Wait    time.Duration // for claims and volumes to end; zero means not at all
}

// cleanup is one run of [Cleanup]. It relies on no cache.
type cleanup struct {
	request CleanupRequest
	key     string
	fixed   bool  // the operator has set the key
	every   *roll // the nodes that exist
	policy  policy
	reader  *reader
	exec    *executor
	bucket  bucket
	forced  map[string]bool // volumes that were deleted in this run
	refused map[string]bool // volumes for which a gate was closed, or that are to be left alone
}

// Cleanup deletes the claims of the volumes of one node that is gone, and on request the
// volumes, after it has written to out what it is going to do. All gates hold but those
// that an administrator who names the node has passed: the grace, the opt-in and the
// breaker. An opt-out wins here as well.
func Cleanup(ctx context.Context, cfg Config, client kubernetes.Interface, request CleanupRequest, out io.Writer) error {
	if request.Node == "" {
		return errors.New("--node: must name the node whose volumes are to be cleaned up")
	}
	cfg.NodeCleanup = CleanupClaims
	if request.Volumes {
		cfg.NodeCleanup = CleanupVolumes
	}
	p := policyOf(cfg, request.Driver)
	p.mode, p.dryRun, p.command = cfg.NodeCleanup, request.DryRun, true
	r := &reader{client: client, policy: p, timeout: cfg.Timeout, system: new(atomic.Value), spent: &spent{}}
	c := &cleanup{request: request, key: cfg.TopologyNodeKey, fixed: cfg.TopologyNodeKey != "", policy: p, reader: r, forced: map[string]bool{}, refused: map[string]bool{}, bucket: bucket{qps: cfg.NodeCleanupQPS, burst: cfg.NodeCleanupBurst}}
	registry := prometheus.NewRegistry() // of which nobody reads anything
	c.exec = &executor{
		reader: r, policy: p, timeout: cfg.Timeout, notify: newNotifier(&directEvents{ctx: ctx, client: client, component: request.Driver}, request.DryRun),
		metrics: newMetrics(registry, func() tally { return tally{} }, func() int { return 0 }),
	}
	if err := c.prepare(ctx); err != nil {
		return err
	}
	found, err := c.find(ctx)
	if err != nil {
		return err
	}
	err = c.plan(ctx, found, out)
	switch {
	case err != nil && (ends(ctx, err) || !request.Yes && !request.DryRun):
		return err
	case !request.Yes && !request.DryRun:
		return fmt.Errorf("%w: this was only the plan; --yes carries it out", ErrRefused)
	}
	if err := c.carryOut(ctx, found, out); err != nil { // which has asked again what the plan could not find out
		return err
	}
	if n := len(c.refused); n > 0 {
		return fmt.Errorf("%w: %d volumes were left as they are, see above", ErrRefused, n)
	}
	return nil
}

// prepare finds out where we are, and refuses when the node or another one that may be it
// exists.
func (c *cleanup) prepare(ctx context.Context) error {
	ns, ok, err := c.reader.namespace(ctx, metav1.NamespaceSystem)
	if err != nil {
		return err
	}
	if ok {
		c.reader.system.Store(ns.UID)
	}
	if !c.fixed {
		if c.key, err = c.findKey(ctx); err != nil {
			return err
		}
	}
	return c.readNodes(ctx)
}

// readNodes finds out which nodes there are and by what volumes may mean them, and refuses
// when one of them may be the one that is gone. A node may come back at any time.
func (c *cleanup) readNodes(ctx context.Context) error {
	foreign, exists := "", map[string]bool{}
	every, err := c.reader.everyNode(ctx, c.key, func(n *corev1.Node, d storagev1.CSINodeDriver, registered bool) {
		exists[n.Name] = true
		if v := n.Labels[c.key]; registered && !c.fixed && v != "" && v != d.NodeID && !slices.Contains(ownNames(n), v) {
			foreign = n.Name
		}
	})
	if err != nil {
		return err
	}
	c.every = every
	if foreign != "" {
		return fmt.Errorf("--topology-node-key: must be set, since topology key %s of driver %q is not one of single nodes: the value that Node %s has is not its name, host name or ID", c.key, c.policy.driver, foreign)
	}
	name := c.request.Node
	var found []string
	for _, n := range every.names.find([]string{name}) {
		if exists[n] {
			found = append(found, "Node "+n)
		} else {
			found = append(found, "CSINode "+n)
		}
	}
	if _, ok, err := c.reader.csiNode(ctx, name); err != nil {
		return err
	} else if ok && !slices.Contains(found, "CSINode "+name) {
		found = append(found, "CSINode "+name)
	}
	if len(found) > 0 {
		return fmt.Errorf("%w: %s exists; delete it first, when it will never come back", ErrRefused, strings.Join(found, ", "))
	}
	return nil
}

// findKey is the only topology key that the driver reports.
func (c *cleanup) findKey(ctx context.Context) (string, error) {
	keys := map[string]bool{}
	err := pages(ctx, c.reader.timeout, "CSINodes", c.reader.listCSINodes, metav1.ListOptions{}, func(n *storagev1.CSINode) bool {
		d, _ := registration(n, c.policy.driver)
		for _, key := range d.TopologyKeys {
			keys[key] = true
		}
		return true
	})
	if err != nil {
		return "", err
	}
	if len(keys) != 1 {
		return "", fmt.Errorf("--topology-node-key: must be set, since driver %q reports %d topology keys", c.policy.driver, len(keys))
	}
	return slices.Collect(maps.Keys(keys))[0], nil
}

// find is the volumes of the node, by their values or by what is written on them.
func (c *cleanup) find(ctx context.Context) ([]snapshot, error) {
	var found []snapshot
	list := func(ctx context.Context, opts metav1.ListOptions) ([]*corev1.PersistentVolume, string, error) {
		list, err := c.reader.client.CoreV1().PersistentVolumes().List(ctx, opts)
		if err != nil {
			return nil, "", err
		}
		return pointers(list.Items), list.Continue, nil
	}
	err := pages(ctx, c.reader.timeout, "PersistentVolumes", list, metav1.ListOptions{}, func(pv *corev1.PersistentVolume) bool {
		values, local := localValues(pv, c.policy.driver, c.key)
		if local && (slices.Contains(values, c.request.Node) || slices.Contains(c.policy.ann.lostNodes(pv), c.request.Node)) {
			found = append(found, snapshot{volume: pv, nodes: []string{c.request.Node}})
		}
		return true
	})
	return found, err
}

// halt is an error after which nothing may be done to any volume: it is not known which
// nodes there are, or the one that is gone is back.
type halt struct{ error }

func (h halt) Unwrap() error { return h.error }

// ends tells whether err is not about one volume alone.
func ends(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errors.As(err, new(halt))
}

// ofVolume is err, which is about that volume.
func ofVolume(s snapshot, err error) error {
	return fmt.Errorf("PersistentVolume %q: %w", s.volume.Name, err)
}

// check is the next step for a volume, and why it may not be taken, which is noted.
func (c *cleanup) check(ctx context.Context, s snapshot) (snapshot, step, []finding, error) {
	s.forced = c.forced[s.volume.Name]
	if err := c.readNodes(ctx); err != nil {
		return s, step{}, nil, halt{err}
	}
	none := func([]string) []string { return nil }
	all := func(context.Context) (*roll, error) { return c.every, nil }
	live, err := c.reader.refresh(ctx, s, c.key, none, all, nil, true)
	if err == nil && live.volume == nil {
		delete(c.refused, s.volume.Name)
	}
	if err != nil || live.volume == nil {
		return live, step{reason: "Gone"}, nil, err
	}
	live.approved = true
	st := c.policy.decide(live)
	var closed []finding
	if st.action.destroys() {
		closed = c.policy.gates(live)
	}
	// That a volume is to be retained is no refusal, once its claim is gone.
	left := st.action == doSkip && (st.gate == gateScope || st.state == stateClaim)
	if delete(c.refused, s.volume.Name); len(closed) > 0 || st.action == doBlocked || left || live.member.place != placeOrphan {
		c.refused[s.volume.Name] = true
	}
	return live, st, closed, nil
}

// plan writes what is to be done, and returns what could not be found out.
func (c *cleanup) plan(ctx context.Context, found []snapshot, out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "VOLUME\tCLAIM\tNEXT STEP\tREASON")
	var errs []error
	for _, s := range found {
		live, st, closed, err := c.check(ctx, s)
		if err != nil && ends(ctx, err) {
			return err
		}
		if err != nil {
			errs = append(errs, ofVolume(s, err))
			fmt.Fprintf(table, "%s\t-\tnot known\t%v\n", s.volume.Name, err)
			continue
		}
		claim, why := "-", st.message
		if live.claim != nil {
			claim = kube.Key(live.claim)
		}
		action := st.action.String()
		switch {
		case len(closed) > 0:
			action, why = "refused", closed[0].String()
		case why == "":
			why = st.reason
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", s.volume.Name, claim, action, why)
	}
	if len(found) == 0 {
		fmt.Fprintf(table, "-\t-\tnothing\tno volume of the driver belongs to node %s\n", c.request.Node)
	}
	return errors.Join(append(errs, table.Flush())...)
}

// pollInterval is the time between two looks at volumes that wait for something else.
const pollInterval = time.Second

// carryOut takes steps until there is nothing left to do, or only what has to be waited
// for when the time for that is over. What is wrong with one volume does not keep it from
// the others.
func (c *cleanup) carryOut(ctx context.Context, found []snapshot, out io.Writer) error {
	end := time.Now().Add(c.request.Wait)
	var errs []error
	for {
		var waiting []snapshot
		for _, s := range found {
			again, err := c.settle(ctx, s, out)
			switch {
			case err != nil && ends(ctx, err) && len(errs) == 0:
				return err
			case err != nil && ends(ctx, err): // not as refused, since something has failed before
				return errors.Join(append(errs, errors.New(err.Error()))...)
			case err != nil:
				errs = append(errs, ofVolume(s, err))
			case again:
				waiting = append(waiting, s)
			}
		}
		if len(waiting) == 0 {
			return errors.Join(errs...)
		}
		if !time.Now().Before(end) {
			return errors.Join(append(errs, fmt.Errorf("volume %s and %d more still wait for their claims to end; run this again when they have", waiting[0].volume.Name, len(waiting)-1))...)
		}
		found = waiting
		if err := pause(ctx, pollInterval); err != nil {
			return err
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// settle takes the steps for one volume that can be taken now. again tells that there
// will be more of them.
func (c *cleanup) settle(ctx context.Context, s snapshot, out io.Writer) (again bool, err error) {
	for range maxRounds {
		for {
			next, ok := c.bucket.take(time.Now())
			if ok {
				break
			}
			if err := pause(ctx, time.Until(next)); err != nil {
				return false, err
			}
		}
		live, st, closed, err := c.check(ctx, s)
		if err != nil || !st.action.destroys() || len(closed) > 0 {
			c.bucket.giveBack()
			return err == nil && live.volume != nil && st.reason == reasonWaiting, err
		}
		if st.action == doDeleteVolume {
			c.forced[s.volume.Name] = true
		}
		left, next, err := c.exec.execute(ctx, live, st)
		if err != nil {
			return false, err
		}
		if !next.IsZero() {
			return true, nil
		}
		fmt.Fprintf(out, "%s: %s\n", s.volume.Name, st.action)
		switch {
		case c.request.DryRun || st.action != doDeleteClaim && left == nil:
			return false, nil
		case st.action == doDeleteClaim && !c.request.Volumes:
			return false, nil
		}
	}
	return true, nil
}

// RemoveFinalizers takes the finalizer of the nodes from all of them, so that nothing
// holds their deletion once this program is gone. It fails when somebody puts it back.
func RemoveFinalizers(ctx context.Context, cfg Config, client kubernetes.Interface, dryRun bool, out io.Writer) error {
	r := &reader{client: client, timeout: cfg.Timeout, system: new(atomic.Value)}
	change := kube.MetadataPatch{RemoveFinalizers: []string{cfg.NodeFinalizer}}
	var errs []error
	removed := false
	err := pages(ctx, cfg.Timeout, "Nodes", r.listNodes, metav1.ListOptions{}, func(node *corev1.Node) bool {
		switch {
		case change.AppliedTo(node):
			return true
		case dryRun:
			fmt.Fprintf(out, "%s: would lose finalizer %s\n", node.Name, cfg.NodeFinalizer)
			return true
		}
		ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
		defer cancel()
		if _, err := kube.PatchMetadata(ctx, client.CoreV1().Nodes(), node, change); err != nil && !kube.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("removing finalizer %s of Node %q: %w", cfg.NodeFinalizer, node.Name, err))
			return true
		}
		fmt.Fprintf(out, "%s: lost finalizer %s\n", node.Name, cfg.NodeFinalizer)
		removed = true
		return true
	})
	if err := errors.Join(append(errs, err)...); err != nil || !removed {
		return err
	}
	return r.stayedAway(ctx, cfg)
}
