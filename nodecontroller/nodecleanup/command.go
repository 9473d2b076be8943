// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

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
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// ErrRefused is returned by commands that did not do everything that was requested.
var ErrRefused = errors.New("refused")

// CleanupRequest describes a clean-up that an administrator requests.
type CleanupRequest struct {
	Driver    string
	Namespace string        // of the ConfigMap with the records, which must exist; empty: there are no records
	Node      string        // must not exist
	Volumes   bool          // also remove the volumes, after their claims were deleted
	Yes       bool          // without it, only the plan is printed
	Wait      time.Duration // for claims and volumes; zero does not wait
}

// command is one run of [Cleanup]. It has no caches.
type command struct {
	request CleanupRequest
	cleaner *cleaner
	listed  *index              // of all Nodes and CSINodes
	records map[string]LostNode // by value of the topology key
	checked time.Time           // by the controller
	table   *tabwriter.Writer
	printed map[string]string // last row of each volume
	kept    int               // volumes
}

// Cleanup prints what it would delete of a deleted node, and with Yes deletes it.
//
// The opt-in and --pv-release-grace do not apply. For the named Node, the grace period and the breaker do not apply either. All other checks apply, and to the other nodes of a volume also these three.
func Cleanup(ctx context.Context, cfg Config, client kubernetes.Interface, request CleanupRequest, out io.Writer) error {
	if request.Node == "" {
		return errors.New("--node: must name the node to clean up after")
	}
	cfg.NodeCleanup, cfg.SkipNodeFinalize = ModeClaims, false
	if request.Volumes {
		cfg.NodeCleanup = ModeVolumes
	}
	p := newPolicy(cfg.Settings, request.Driver)
	p.command, p.plan = true, !request.Yes
	c := &command{request: request, records: map[string]LostNode{}, printed: map[string]string{}}
	c.records[request.Node] = LostNode{Value: request.Node, Node: request.Node}
	l := newLive(client, cfg.Timeout)
	c.cleaner = &cleaner{
		policy: p, live: l, cluster: c.cluster,
		gather: gatherer{p, c.key, l.source, c.record, func(v string) []string { return c.listed.names.with(v) },
			[]string{request.Node}},
		notify:  newNotifier(sendEvent(ctx, client, request.Driver)),
		metrics: newMetrics(prometheus.NewRegistry(), func() counts { return counts{} }),
		confirm: func(context.Context) error { return nil }, allow: func() bool { return true },
		acts: func(context.Context, []string) (bool, error) { return false, nil },
	}
	volumes, err := c.prepare(ctx)
	if err != nil {
		return err
	}
	c.table = tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(c.table, "VOLUME\tCLAIM\tSTEP\tREASON")
	if len(volumes) == 0 {
		fmt.Fprintf(c.table, "-\t-\tnothing\tno volume of the driver belongs to node %s\n", request.Node)
	}
	if err := c.run(ctx, volumes); err != nil || p.plan || c.kept == 0 {
		return err
	}
	return fmt.Errorf("%w: %d volumes were kept", ErrRefused, c.kept)
}

func (c *command) record(value string) (LostNode, bool) {
	r, ok := c.records[value]
	return r, ok
}

func (c *command) key() string {
	key, _ := c.listed.topologyKey()
	return key
}

// prepare returns the volumes of the Node. It refuses if anything exists that may be the Node.
func (c *command) prepare(ctx context.Context) (found []volume, err error) {
	l, named := c.cleaner.live, &c.cleaner.gather.named
	if c.request.Namespace != "" {
		cm, err := getRecords(ctx, l.client, c.request.Namespace, c.request.Driver)
		if err != nil {
			return nil, err
		}
		for _, r := range ParseLostNodes(cm) {
			c.records[r.Value] = r
			if r.Node == c.request.Node {
				*named = sorted(*named, []string{r.Value})
			}
		}
		c.checked, _ = time.Parse(time.RFC3339, cm.Annotations[AnnotationLastLook])
	}
	if err := c.list(ctx); err != nil {
		return nil, err
	}
	volumes, err := l.listVolumes(ctx)
	for _, pv := range volumes {
		values, _ := localValues(pv, c.request.Driver, c.key())
		if slices.ContainsFunc(values, func(v string) bool { return slices.Contains(*named, v) }) {
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
	if _, problem := c.listed.topologyKey(); problem != "" {
		return fmt.Errorf("finding the volumes of node %q: %s. Set --topology-node-key", c.request.Node, problem)
	}
	for _, value := range c.cleaner.gather.named {
		if names := c.listed.names.with(value); len(names) > 0 {
			return fmt.Errorf("%w: Node or CSINode %s exists. Delete it first, if the node never returns", ErrRefused,
				kube.ShortList(names, 10))
		}
	}
	return nil
}

// cluster reads the state of the cluster. Its breaker, which is for hosts that are not named, counts all records: which of
// them have something to delete is not known.
func (c *command) cluster(ctx context.Context, _ bool) (s cluster, err error) {
	var lost []string
	held := false
	for _, r := range c.records {
		held = held || r.opens()
		if !r.Planned && !r.OptedOut {
			lost = append(lost, r.Value)
		}
	}
	s = cluster{now: time.Now(), checked: c.checked}
	s.open = c.cleaner.policy.evaluate(lost, c.listed.driverNodes().hosts, held).open
	s.bare, _ = c.listed.ambiguous()
	s.readyNode, err = c.cleaner.live.ready(ctx, c.listed.driverNodes().ready, c.request.Driver)
	return s, err
}

// maxPause bounds the pause between two rounds.
const maxPause = 10 * time.Second

// run takes steps until nothing is left to do, or the time to wait is over. For a plan it takes none.
func (c *command) run(ctx context.Context, volumes []volume) (err error) {
	end := time.Now().Add(c.request.Wait)
	for pause := time.Second; ; pause = min(2*pause, maxPause) { // each round lists all Nodes
		volumes = slices.DeleteFunc(volumes, func(v volume) bool {
			again, e := c.settle(ctx, v)
			err = errors.Join(err, e)
			return e != nil || !again || ctx.Err() != nil
		})
		err = errors.Join(err, c.table.Flush())
		switch {
		case len(volumes) == 0 || c.cleaner.policy.plan || ctx.Err() != nil:
			return errors.Join(err, context.Cause(ctx))
		case !time.Now().Before(end):
			return errors.Join(err, fmt.Errorf("%d volumes still wait for their claims, such as %s. Run the command again later",
				len(volumes), volumes[0].pv.Name))
		}
		select {
		case <-ctx.Done():
		case <-time.After(min(pause, time.Until(end))):
		}
		if e := c.list(ctx); e != nil {
			return errors.Join(err, e)
		}
	}
}

// settle takes the steps for a volume that can be taken now. again means that more follow later.
func (c *command) settle(ctx context.Context, v volume) (again bool, err error) {
	for range maxRounds {
		var r result
		err := election.Reread(func() (err error) { r, err = c.cleaner.remove(ctx, v, ""); return err })
		switch st := r.step; {
		case err != nil:
			c.print(v, "failed", err.Error())
			return false, fmt.Errorf("PersistentVolume %q: %w", v.pv.Name, err)
		case len(r.reasons) > 0:
			c.print(v, "refused", r.reasons[0].String())
			c.kept++
			return false, nil
		case st.action == "": // the volume does not exist
			return false, nil
		default:
			c.print(v, string(st.action), strings.Trim(st.reason+": "+st.message, ": "))
		}
		switch st := r.step; {
		case !r.done && (st.action == doReport || st.action == doSkip && (st.check == checkScope || st.state == stateClaim)):
			c.kept++
			return false, nil
		case !r.done:
			return st.pending && st.action == doNothing, nil
		case st.action == doDeleteClaim && !c.request.Volumes:
			return false, nil
		}
		v.sent = true
	}
	return true, nil
}

// print prints a row about a volume, unless it is the last one that was printed.
func (c *command) print(v volume, step, reason string) {
	claim := "-"
	if ref := v.pv.Spec.ClaimRef; ref != nil {
		claim = ref.Namespace + "/" + ref.Name
	}
	if row := v.pv.Name + "\t" + claim + "\t" + step + "\t" + reason; c.printed[v.pv.Name] != row {
		c.printed[v.pv.Name] = row
		fmt.Fprintln(c.table, row)
	}
}

// getRecords reads the ConfigMap with the records of driver.
func getRecords(ctx context.Context, client kubernetes.Interface, namespace, driver string) (*corev1.ConfigMap, error) {
	name := ConfigMapName(driver)
	cm, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("reading the records of lost nodes in ConfigMap \"%s/%s\": %w. Set --namespace to the namespace of the "+
			"nodecontroller, or omit it to search all namespaces", namespace, name, err)
	}
	return cm, nil
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
	cm, err := getRecords(ctx, client, request.Namespace, request.Driver)
	if err != nil {
		return err
	}
	names := strings.FieldsFunc(cm.Annotations[AnnotationApprove], func(r rune) bool { return r == ',' || r == ' ' })
	metav1.SetMetaDataAnnotation(&cm.ObjectMeta, AnnotationApprove, strings.Join(sorted(names, request.Nodes), ","))
	after := recordSetOf(cm)
	mode := Mode(cm.Annotations[AnnotationMode]) // "" is unknown
	problems := after.approve(time.Now(), mode == "" || Settings{NodeCleanup: mode}.Deletes())
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "NODE\tSINCE\tSTATE\tAPPROVAL")
	for _, r := range ParseLostNodes(cm) {
		since, approval := "-", "-"
		if !r.Since.IsZero() {
			since = r.Since.Format(time.RFC3339)
		}
		if after.lost[r.Value] != r {
			approval = "will be approved"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", r.Name(), since, r.State(), approval)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if len(problems) > 0 {
		err = fmt.Errorf("%w: approving the cleanup in ConfigMap \"%s/%s\": %s", ErrRefused, request.Namespace, cm.Name,
			strings.Join(problems, "; "))
	}
	switch {
	case !request.Yes && err != nil:
		_, err = fmt.Fprintln(out, err)
		return err
	case err != nil || !request.Yes:
		return err
	case len(request.Nodes) == 0:
		return errors.New("no node is named. Name the nodes to approve")
	}
	if _, err = client.CoreV1().ConfigMaps(request.Namespace).Update(ctx, cm, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("approving the cleanup in ConfigMap \"%s/%s\": %w. Try again", request.Namespace, cm.Name, err)
	}
	_, err = fmt.Fprintf(out, "approved: %s\n", strings.Join(request.Nodes, ", "))
	return err
}

// RemoveFinalizers prints the Nodes with our finalizer, and with yes removes it, so that nothing holds
// their deletion after the controller was uninstalled. It fails if a finalizer is added again.
func RemoveFinalizers(ctx context.Context, cfg Config, client kubernetes.Interface, yes bool, out io.Writer) error {
	change := kube.MetadataPatch{RemoveFinalizers: []string{cfg.NodeFinalizer}}
	with := func() ([]*corev1.Node, error) {
		nodes, err := list[*corev1.Node](ctx, newLive(client, cfg.Timeout), "Nodes", client.CoreV1().Nodes().List)
		return slices.DeleteFunc(nodes, func(n *corev1.Node) bool { return change.AppliedTo(n) }), err
	}
	nodes, err := with()
	for _, n := range nodes {
		result := "would be removed"
		if yes {
			result = "removed"
			patch, cancel := context.WithTimeout(ctx, cfg.Timeout)
			if _, e := kube.PatchMetadata(patch, client.CoreV1().Nodes(), n, change); e != nil && !kube.IsNotFound(e) {
				result = "not removed"
				err = errors.Join(err, fmt.Errorf("removing finalizer %s of Node %q: %w", cfg.NodeFinalizer, n.Name, e))
			}
			cancel()
		}
		fmt.Fprintf(out, "%s: finalizer %s %s\n", n.Name, cfg.NodeFinalizer, result)
	}
	if err == nil && len(nodes) == 0 {
		_, err = fmt.Fprintf(out, "no Node has finalizer %s\n", cfg.NodeFinalizer)
	}
	if err != nil || !yes || len(nodes) == 0 {
		return err
	}
	select { // a component that adds it again does so when it sees the change
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(finalizerReturns):
	}
	if nodes, err = with(); err == nil && len(nodes) > 0 {
		err = fmt.Errorf("finalizer %s was added again to Node %q and %d more. Stop the nodecontroller or set "+
			"--node-finalizer-mode=remove, and remove the driver from its nodes if it adds the finalizer", cfg.NodeFinalizer,
			nodes[0].Name, len(nodes)-1)
	}
	return err
}

// finalizerReturns is the time in which a running component adds a removed finalizer again.
const finalizerReturns = 2 * time.Second
