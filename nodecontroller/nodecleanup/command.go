package nodecleanup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// ErrRefused is returned by commands that did not do everything that was requested.
var ErrRefused = errors.New("refused")

// CleanupRequest describes a clean-up that an administrator requests.
type CleanupRequest struct {
	Driver    string
	Namespace string        // of the ConfigMap with the records; may be empty
	Node      string        // must not exist
	Volumes   bool          // also remove the volumes, after their claims were deleted
	DryRun    bool          // send every deletion with server-side dry run
	Yes       bool          // without Yes and DryRun, only the plan is printed
	Wait      time.Duration // for claims and volumes; zero does not wait
}

// command is one run of [Cleanup]. It has no caches.
type command struct {
	request CleanupRequest
	cleaner *cleaner
	listed  *index // of all Nodes and CSINodes
	key     string
	records map[string]LostNode // of the Node, by value of the topology key
	system  types.UID           // of the namespace kube-system
	refused map[string]bool
}

// Cleanup prints what it would delete of a deleted node, and with Yes or DryRun deletes it. All checks
// of the controller apply except the grace, the opt-in and the breaker.
func Cleanup(ctx context.Context, cfg Config, client kubernetes.Interface, request CleanupRequest, out io.Writer) error {
	if request.Node == "" {
		return errors.New("--node: must name the node to clean up after")
	}
	cfg.NodeCleanup, cfg.SkipNodeFinalize = ModeClaims, false
	if request.Volumes {
		cfg.NodeCleanup = ModeVolumes
	}
	p := newPolicy(cfg.Settings, request.Driver)
	p.command, p.dryRun = true, request.DryRun
	c := &command{request: request, records: map[string]LostNode{}, refused: map[string]bool{}}
	c.records[request.Node] = LostNode{Value: request.Node, Node: request.Node}
	l := live{client, cfg.Timeout}
	c.cleaner = &cleaner{
		policy: p, live: l, cluster: c.cluster,
		gather:  gatherer{p, func() string { return c.key }, l, c.record, func(v string) []string { return c.listed.nodesNamed(v) }},
		notify:  newNotifier(sendEvent(ctx, client, request.Driver), request.DryRun),
		metrics: newMetrics(prometheus.NewRegistry(), func() counts { return counts{} }),
		confirm: func(context.Context) error { return nil }, allow: func() bool { return true },
		acts: func(context.Context, []string) (bool, error) { return false, nil },
	}
	volumes, err := c.prepare(ctx)
	if err != nil {
		return err
	}
	if err := c.plan(ctx, volumes, out); err != nil || !request.Yes && !request.DryRun {
		return err
	}
	if err := c.carryOut(ctx, volumes, out); err != nil {
		return err
	}
	if n := len(c.refused); n > 0 {
		return fmt.Errorf("%w: %d volumes were kept", ErrRefused, n)
	}
	return nil
}

func (c *command) record(value string) (LostNode, bool) {
	r, ok := c.records[value]
	return r, ok
}

// prepare returns the volumes of the Node. It refuses if anything exists that may be the Node.
func (c *command) prepare(ctx context.Context) (found []volume, err error) {
	l, p := c.cleaner.live, c.cleaner.policy
	if c.request.Namespace != "" {
		records, err := ReadLostNodes(ctx, l.client, c.request.Namespace, c.request.Driver)
		if err != nil {
			return nil, err
		}
		for _, r := range records {
			if r.Node == c.request.Node || r.Value == c.request.Node {
				c.records[r.Value] = r
			}
		}
	}
	if err := c.list(ctx); err != nil {
		return nil, err
	}
	if ns, err := l.namespace(ctx, metav1.NamespaceSystem); err != nil {
		return nil, err
	} else if ns != nil {
		c.system = ns.UID
	}
	volumes, err := list[*corev1.PersistentVolume](ctx, l, "PersistentVolumes", l.client.CoreV1().PersistentVolumes().List)
	for _, pv := range volumes {
		values, _ := localValues(pv, p.driver, c.key)
		if slices.ContainsFunc(values, func(v string) bool { _, ok := c.records[v]; return ok }) {
			found = append(found, volume{pv: pv, hosts: []host{{value: values[0], state: missing}}})
		}
	}
	return found, err
}

// list lists all Nodes and CSINodes. It refuses if one of them may be the Node.
func (c *command) list(ctx context.Context) (err error) {
	if c.listed, err = c.cleaner.live.index(ctx, c.request.Driver, c.cleaner.policy.TopologyNodeKey); err != nil {
		return err
	}
	key, problem := c.listed.topologyKey()
	if c.key = key; problem != "" {
		return fmt.Errorf("finding the volumes of node %q: %s. Set --topology-node-key", c.request.Node, problem)
	}
	for value := range c.records {
		if names := c.listed.nodesNamed(value); len(names) > 0 {
			return fmt.Errorf("%w: Node or CSINode %s exists. Delete it first, if the node never returns", ErrRefused, shortList(names))
		}
	}
	return nil
}

// cluster reads the state of the cluster.
func (c *command) cluster(ctx context.Context, _ bool) (cluster, error) {
	s := cluster{now: time.Now(), bare: c.listed.bareNodes()}
	var err error
	if s.readyNode, err = c.cleaner.live.ready(ctx, c.listed.readyNodes(), c.request.Driver); err != nil {
		return s, err
	}
	ns, err := c.cleaner.live.namespace(ctx, metav1.NamespaceSystem)
	s.sameCluster = ns != nil && ns.UID == c.system
	return s, err
}

// plan prints the next step for each volume.
func (c *command) plan(ctx context.Context, volumes []volume, out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "VOLUME\tCLAIM\tNEXT STEP\tREASON")
	state, err := c.cluster(ctx, true)
	if err != nil {
		return err
	}
	var errs []error
	for _, seen := range volumes {
		v, err := c.cleaner.gather.volume(ctx, seen.pv.Name)
		if err != nil {
			fmt.Fprintf(table, "%s\t-\tunknown\t%v\n", seen.pv.Name, err)
			errs = append(errs, fmt.Errorf("PersistentVolume %q: %w", seen.pv.Name, err))
		}
		if err != nil || v.pv == nil {
			continue
		}
		st, claim := c.cleaner.policy.nextStep(v, state.now), "-"
		if v.claim != nil {
			claim = kube.Key(v.claim)
		}
		what, why := string(st.action), strings.Trim(st.reason+": "+st.message, ": ")
		reasons := c.cleaner.policy.mayClean(target{hosts: v.hosts, consent: v.consent, users: v.users}, state)
		if st.action.deletes() && len(reasons) > 0 {
			what, why = "refused", reasons[0].String()
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", v.pv.Name, claim, what, why)
	}
	if len(volumes) == 0 {
		fmt.Fprintf(table, "-\t-\tnothing\tno volume of the driver belongs to node %s\n", c.request.Node)
	}
	err = table.Flush()
	if c.request.Yes || c.request.DryRun { // every volume is tried
		return err
	}
	return errors.Join(append(errs, err)...)
}

// carryOut takes steps until nothing is left to do, or the time to wait is over.
func (c *command) carryOut(ctx context.Context, volumes []volume, out io.Writer) error {
	end := time.Now().Add(c.request.Wait)
	var errs []error
	for {
		volumes = slices.DeleteFunc(volumes, func(v volume) bool {
			again, err := c.settle(ctx, v, out)
			if err != nil {
				errs = append(errs, fmt.Errorf("PersistentVolume %q: %w", v.pv.Name, err))
			}
			return err != nil || !again || ctx.Err() != nil
		})
		switch {
		case len(volumes) == 0 || ctx.Err() != nil:
			return errors.Join(append(errs, context.Cause(ctx))...)
		case !time.Now().Before(end):
			return errors.Join(append(errs, fmt.Errorf("%d volumes still wait for their claims, such as %s. Run the command again later",
				len(volumes), volumes[0].pv.Name))...)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
		if err := c.list(ctx); err != nil {
			return errors.Join(append(errs, err)...)
		}
	}
}

// settle takes the steps for a volume that can be taken now. again means that more follow later.
func (c *command) settle(ctx context.Context, v volume, out io.Writer) (again bool, err error) {
	for range maxRounds {
		r, err := c.cleaner.remove(ctx, v, "")
		if err != nil {
			return false, err
		}
		delete(c.refused, v.pv.Name)
		switch st := r.step; {
		case len(r.reasons) > 0:
			fmt.Fprintf(out, "%s: refused: %s\n", v.pv.Name, r.reasons[0])
			c.refused[v.pv.Name] = true
			return false, nil
		case !r.done:
			if st.action == doReport || st.action == doSkip && (st.check == checkScope || st.state == stateClaim) {
				fmt.Fprintf(out, "%s: kept: %s: %s\n", v.pv.Name, st.reason, st.message)
				c.refused[v.pv.Name] = true
			}
			return st.pending && st.action == doNothing, nil
		}
		fmt.Fprintf(out, "%s: %s\n", v.pv.Name, r.step.action)
		if v.sent = true; c.request.DryRun || r.step.action == doDeleteClaim && !c.request.Volumes {
			return false, nil
		}
	}
	return true, nil
}

// ApproveRequest names the lost nodes whose clean-up an administrator approves.
type ApproveRequest struct {
	Driver    string
	Namespace string   // of the ConfigMap
	Nodes     []string // names or values
	Yes       bool     // without Yes, only the plan is printed
}

// Approve prints the lost nodes and what the approval changes, and with Yes writes the approval. The
// controller consumes it.
func Approve(ctx context.Context, client kubernetes.Interface, request ApproveRequest, out io.Writer) error {
	name := ConfigMapName(request.Driver)
	maps := client.CoreV1().ConfigMaps(request.Namespace)
	cm, err := maps.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("reading the records of lost nodes in ConfigMap \"%s/%s\": %w. Set the namespace of the controller",
			request.Namespace, name, err)
	}
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "NODE\tSINCE\tSTATE\tAPPROVAL")
	rest := slices.Clone(request.Nodes)
	for _, r := range ParseLostNodes(cm) {
		since, what, node := "-", r.summary(), r.Value
		if !r.Since.IsZero() {
			since = r.Since.Format(time.RFC3339)
		}
		if r.Node != "" {
			node = r.Node
		}
		approval := "-"
		if slices.Contains(request.Nodes, r.Value) || slices.Contains(request.Nodes, r.Node) {
			approval = "will be approved"
			rest = slices.DeleteFunc(rest, func(n string) bool { return n == r.Value || n == r.Node })
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", node, since, what, approval)
	}
	for _, node := range rest {
		fmt.Fprintf(table, "%s\t-\tnot lost\twill be approved when it is lost\n", node)
	}
	if err := table.Flush(); err != nil || !request.Yes {
		return err
	}
	if len(request.Nodes) == 0 {
		return errors.New("no node is named. Name the nodes to approve")
	}
	names := strings.FieldsFunc(cm.Annotations[AnnotationApprove], func(r rune) bool { return r == ',' || r == ' ' })
	metav1.SetMetaDataAnnotation(&cm.ObjectMeta, AnnotationApprove, strings.Join(sorted(names, request.Nodes), ","))
	if _, err = maps.Update(ctx, cm, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("approving the cleanup in ConfigMap \"%s/%s\": %w. Try again", request.Namespace, name, err)
	}
	_, err = fmt.Fprintf(out, "approved: %s\n", strings.Join(request.Nodes, ", "))
	return err
}

// summary returns the state of a record in a word.
func (r LostNode) summary() string {
	switch {
	case r.OptedOut:
		return "opted out"
	case r.Held != "":
		return "held"
	case !r.Approved.IsZero():
		return "approved"
	case r.Since.IsZero():
		return "being deleted"
	}
	return "missing"
}

// RemoveFinalizers prints the Nodes with our finalizer, and with yes removes it, so that nothing holds
// their deletion after the controller was uninstalled. It fails if a finalizer is added again.
func RemoveFinalizers(ctx context.Context, cfg Config, client kubernetes.Interface, yes bool, out io.Writer) error {
	l := live{client, cfg.Timeout}
	change := kube.MetadataPatch{RemoveFinalizers: []string{cfg.NodeFinalizer}}
	with := func() ([]*corev1.Node, error) {
		nodes, err := list[*corev1.Node](ctx, l, "Nodes", client.CoreV1().Nodes().List)
		return slices.DeleteFunc(nodes, func(n *corev1.Node) bool { return change.AppliedTo(n) }), err
	}
	nodes, err := with()
	if err != nil {
		return err
	}
	var errs []error
	for _, n := range nodes {
		if !yes {
			fmt.Fprintf(out, "%s: finalizer %s would be removed\n", n.Name, cfg.NodeFinalizer)
			continue
		}
		patch, cancel := context.WithTimeout(ctx, cfg.Timeout)
		_, err := kube.PatchMetadata(patch, client.CoreV1().Nodes(), n, change)
		cancel()
		if err != nil && !kube.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("removing finalizer %s of Node %q: %w", cfg.NodeFinalizer, n.Name, err))
			continue
		}
		fmt.Fprintf(out, "%s: finalizer %s removed\n", n.Name, cfg.NodeFinalizer)
	}
	if err := errors.Join(errs...); err != nil || !yes || len(nodes) == 0 {
		return err
	}
	select { // a component that adds it again does so when it sees the change
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(finalizerReturns):
	}
	if nodes, err = with(); err == nil && len(nodes) > 0 {
		err = fmt.Errorf("finalizer %s was added again to Node %q and %d more. Stop the nodecontroller or set "+
			"--node-finalizer-mode=remove, and remove the driver from its nodes if it adds the finalizer", cfg.NodeFinalizer, nodes[0].Name, len(nodes)-1)
	}
	return err
}

// finalizerReturns is the time in which a running component adds a removed finalizer again.
const finalizerReturns = 2 * time.Second
