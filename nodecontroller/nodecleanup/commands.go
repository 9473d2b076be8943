// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// ErrRefused is returned by commands that did not do everything that was requested.
var ErrRefused = errors.New("refused")

// ApproveRequest names the lost nodes whose cleanup an administrator approves.
type ApproveRequest struct {
	Driver    string
	Namespace string   // of the ConfigMap
	Nodes     []string // names or values
	Held      bool     // also all that are held
	All       bool     // also agree to the deletion of what did not opt in
	Yes       bool     // without Yes, only the plan is printed
}

// Approve prints the lost nodes and what the approval changes, and with Yes writes the approval. The controller consumes it. It
// returns [ErrRefused] if a node has no record, or if the controller deletes nothing.
func Approve(ctx context.Context, cfg Config, client kubernetes.Interface, request ApproveRequest, out io.Writer) error {
	a := apiServer{client: client, timeout: cfg.Timeout}
	cm, err := a.configMap(ctx, request.Namespace, request.Driver)
	name := fmt.Sprintf("ConfigMap \"%s/%s\"", request.Namespace, ConfigMapName(request.Driver))
	if err == nil && cm == nil {
		err = errors.New("it does not exist")
	}
	if err != nil {
		return fmt.Errorf("reading the records of lost nodes in %s: %w. Set --namespace to the namespace of the nodecontroller, or omit "+
			"it to search all namespaces", name, err)
	}
	before := parseRecords(cm)
	if request.Held {
		for value, n := range before.Lost {
			if n.Held != "" && !n.Unparsable {
				request.Nodes = append(request.Nodes, value)
			}
		}
	}
	names := slices.Clone(request.Nodes)
	for i := range names {
		if request.All {
			names[i] += approveAll
		}
	}
	cfg.Driver, cfg.NodeCleanup = request.Driver, before.Mode
	cfg.TopologyNodeKey = cmp.Or(cfg.TopologyNodeKey, before.TopologyKey)
	after := Records{Lost: maps.Clone(before.Lost), Approve: names}
	approved, problems := after.approve(cfg.Settings, time.Now())
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "NODE\tSINCE\tSTATE\tAPPROVAL\tNEXT")
	for _, n := range ParseLostNodes(cm) {
		since, approval := "-", "-"
		if !n.Since.IsZero() {
			since = n.Since.Format(time.RFC3339)
		}
		if slices.Contains(approved, n.Value) {
			approval = "will be approved"
			if request.All {
				approval += ", also without an opt-in"
			}
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\n", n.Name(), since, n.State(), approval, n.Next)
	}
	err = table.Flush()
	if err == nil && request.All {
		err = a.printNeverOptedIn(ctx, cfg.Settings, before, approved, out)
	}
	switch {
	case err != nil:
		return err
	case len(problems) > 0:
		return fmt.Errorf("%w: %s", ErrRefused, problems[0].Message)
	case !request.Yes:
		return nil
	case len(request.Nodes) == 0:
		return errors.New("no node is named. Name the nodes to approve")
	}
	metav1.SetMetaDataAnnotation(&cm.ObjectMeta, AnnotationApprove, strings.Join(sorted(before.Approve, names), ","))
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	if _, err = client.CoreV1().ConfigMaps(request.Namespace).Update(ctx, cm, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("approving the cleanup in %s: %w. Try again", name, err)
	}
	_, err = fmt.Fprintf(out, "approved: %s\n", strings.Join(sorted(request.Nodes), ", "))
	return err
}

// printNeverOptedIn prints the volumes and claims of approved hosts that only the approval agrees to delete. before are the records
// without it.
func (a apiServer) printNeverOptedIn(ctx context.Context, s Settings, before Records, approved []string, out io.Writer) error {
	l, err := a.lists(ctx, listed{}, false, true)
	if err != nil {
		return err
	}
	s.NodeCleanupRetain = RetainClaim // the controller's setting is not known
	for _, pv := range l.volumes {
		values, local := localValues(pv, s.Driver, s.TopologyNodeKey)
		if !local || slices.ContainsFunc(values, func(value string) bool { return !slices.Contains(approved, value) }) {
			continue
		}
		it, err := readItem(ctx, s, a, s.TopologyNodeKey, pv.Name)
		if err != nil {
			return err
		}
		refusals := map[string]bool{}
		f := factsOf(s, Plan{Records: before}, &it)
		for _, r := range rules {
			if r.check == CheckScope || r.check == CheckPolicy {
				r.refuses(s, f, func(time.Time, string, string, ...any) { refusals[r.name] = true })
			}
		}
		claim := "-"
		if it.Claim != nil {
			claim = kube.Key(it.Claim)
		}
		if refusals["consent"] && len(refusals) == 1 {
			what := "will be deleted"
			if pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRetain {
				what = "the claim will be deleted if the controller has --node-cleanup-retain=claim"
			}
			fmt.Fprintf(out, "did not opt in, and %s: volume %s, claim %s\n", what, pv.Name, claim)
		}
	}
	return nil
}

// RemoveFinalizers prints the Nodes with our finalizer, and with yes removes it, so that nothing holds their deletion after the
// controller was uninstalled. A running nodecontroller may add it again.
func RemoveFinalizers(ctx context.Context, cfg Config, client kubernetes.Interface, yes bool, out io.Writer) error {
	change := kube.MetadataPatch{RemoveFinalizers: []string{cfg.NodeFinalizer}}
	nodes, err := apiServer{client: client, timeout: cfg.Timeout}.nodes(ctx, "")
	nodes = slices.DeleteFunc(nodes, func(n *corev1.Node) bool { return change.AppliedTo(n) })
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
	return err
}
