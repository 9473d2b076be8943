// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
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
	Held      bool     // also all that are held
	All       bool     // agree also for volumes whose owners did not opt in
	Yes       bool     // without Yes, only the plan is printed
}

// Approve prints the lost nodes and what the approval changes, and with Yes writes the approval. The
// controller consumes it. With All, the plan lists the claims and volumes that did not opt in.
func Approve(ctx context.Context, cfg Config, client kubernetes.Interface, request ApproveRequest, out io.Writer) error {
	cm, err := getRecords(ctx, client, request.Namespace, request.Driver)
	if err != nil {
		return err
	}
	before := ParseLostNodes(cm)
	for _, r := range before {
		if request.Held && r.opens() && !r.Unparsable {
			request.Nodes = sorted(request.Nodes, []string{r.Value})
		}
	}
	names := strings.FieldsFunc(cm.Annotations[AnnotationApprove], func(r rune) bool { return r == ',' || r == ' ' })
	for _, name := range request.Nodes {
		if request.All {
			name += approveAll
		}
		names = sorted(names, []string{name})
	}
	metav1.SetMetaDataAnnotation(&cm.ObjectMeta, AnnotationApprove, strings.Join(names, ","))
	after := recordSetOf(cm)
	mode := Mode(cm.Annotations[AnnotationMode]) // "" is unknown
	problems := after.approve(time.Now(), mode == "" || Settings{NodeCleanup: mode}.Deletes())
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "NODE\tSINCE\tSTATE\tAPPROVAL")
	var approvedAll []string
	for _, r := range before {
		since, approval := "-", "-"
		if !r.Since.IsZero() {
			since = r.Since.Format(time.RFC3339)
		}
		switch next := after.lost[r.Value]; {
		case next.agrees() && !r.agrees():
			approval = "will be approved, also without an opt-in"
			approvedAll = append(approvedAll, r.Value)
		case next != r:
			approval = "will be approved"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", r.Name(), since, r.State(), approval)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	cfg.NodeCleanup = mode
	key := cmp.Or(cfg.TopologyNodeKey, cm.Annotations[AnnotationTopologyKey])
	if err := printAgreed(ctx, newLive(client, cfg.Timeout), newPolicy(cfg.Settings, request.Driver), key, approvedAll, out); err != nil {
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

// printAgreed prints what would be deleted of hosts although its owners did not opt in, once these hosts are approved for all.
func printAgreed(ctx context.Context, l live, p Policy, key string, hosts []string, out io.Writer) error {
	if len(hosts) == 0 {
		return nil
	}
	g := gatherer{policy: p, key: func() string { return key }, src: l.source,
		record: func(string) (LostNode, bool) { return LostNode{}, false }}
	volumes, err := l.listVolumes(ctx)
	if err != nil {
		return err
	}
	for _, pv := range volumes {
		values, local := localValues(pv, p.driver, key)
		if !local || slices.ContainsFunc(values, func(v string) bool { return !slices.Contains(hosts, v) }) {
			continue
		}
		v, _, err := g.owned(ctx, pv.Name)
		if err != nil {
			return err
		}
		if v.pv == nil || v.refusal != p.noOptIn() {
			continue
		}
		v.refusal = ""
		if st := p.nextStep(v, time.Now()); st.pending {
			claim := "-"
			if v.claim != nil {
				claim = kube.Key(v.claim)
			}
			fmt.Fprintf(out, "did not opt in, and will be deleted: volume %s, claim %s\n", pv.Name, claim)
		}
	}
	return nil
}

// RemoveFinalizers prints the Nodes with our finalizer, and with yes removes it, so that nothing holds
// their deletion after the controller was uninstalled.
func RemoveFinalizers(ctx context.Context, cfg Config, client kubernetes.Interface, yes bool, out io.Writer) error {
	change := kube.MetadataPatch{RemoveFinalizers: []string{cfg.NodeFinalizer}}
	nodes, err := list[*corev1.Node](ctx, newLive(client, cfg.Timeout), "Nodes", client.CoreV1().Nodes().List)
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
