package nodecontroller

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// returnTime is how long a running nodecontroller is given to put a finalizer back, so
// that the command does not end as if all were done.
const returnTime = 5 * time.Second

// stayedAway looks again at the nodes after finalizers were removed. The error says who has put
// them back, since every later deletion of such a node would hang.
func (r *reader) stayedAway(ctx context.Context, cfg Config) error {
	if err := pause(ctx, returnTime); err != nil {
		return err
	}
	var nodes, managers []string
	err := pages(ctx, r.timeout, "Nodes", r.listNodes, metav1.ListOptions{}, func(node *corev1.Node) bool {
		if slices.Contains(node.Finalizers, cfg.NodeFinalizer) {
			nodes = append(nodes, node.Name)
			managers = append(managers, managerOf(node, cfg.NodeFinalizer)...)
		}
		return true
	})
	if err != nil || len(nodes) == 0 {
		return err
	}
	slices.Sort(managers)
	by := strings.Join(slices.Compact(managers), ", ")
	if by == "" {
		by = "somebody who is not noted on them"
	}
	names := strings.Join(nodes[:min(len(nodes), 3)], ", ")
	if more := len(nodes) - 3; more > 0 {
		names += fmt.Sprintf(" and %d more", more)
	}
	return fmt.Errorf("finalizer %s is back on %d nodes (%s), put there by %s; %s. Stop the nodecontroller, or give it --node-finalizer-mode=remove, and where the driver adds the finalizer remove the driver from its nodes first; then run this again",
		cfg.NodeFinalizer, len(nodes), names, by, r.leader(ctx, cfg.LeaderElectionID))
}

// managerOf is the program that wrote finalizer on node, as far as the API server has noted that.
func managerOf(node *corev1.Node, finalizer string) []string {
	owned := strconv.Quote("v:" + strconv.Quote(finalizer))
	var managers []string
	for _, m := range node.ManagedFields {
		if m.FieldsV1 != nil && strings.Contains(m.FieldsV1.GetRawString(), owned) {
			managers = append(managers, m.Manager)
		}
	}
	return managers
}

// leader says who holds the Lease of that name, in whichever namespace; with permission for the own
// one alone, in that.
func (r *reader) leader(ctx context.Context, name string) string {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	leases, err := leasesCalled(ctx, r.client, name)
	if err != nil {
		return fmt.Sprintf("who holds the Lease %s could not be read: %v", name, err)
	}
	var held []string
	for _, l := range leases {
		if holder := ptr.Deref(l.Spec.HolderIdentity, ""); holder != "" {
			held = append(held, fmt.Sprintf("Lease %s is held by %q", kube.Key(&l), holder))
		}
	}
	if len(held) == 0 {
		return "nobody holds the Lease " + name + ": a nodecontroller works without one, or under another name"
	}
	return strings.Join(held, ", ")
}

func leasesCalled(ctx context.Context, client kubernetes.Interface, name string) ([]coordinationv1.Lease, error) {
	list, err := client.CoordinationV1().Leases(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
	if err == nil {
		return list.Items, nil
	}
	if !apierrors.IsForbidden(err) {
		return nil, err
	}
	lease, err := client.CoordinationV1().Leases(election.Namespace("")).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return []coordinationv1.Lease{*lease}, nil
}
