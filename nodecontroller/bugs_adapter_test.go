package nodecontroller

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// volumesOn returns the volumes on a node.
func (f *fixture) volumesOn(ctx context.Context, node string) (on []corev1.PersistentVolume) {
	list, err := f.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil
	}
	for _, pv := range list.Items {
		if values, ok := localValues(&pv, f.driver, f.key); ok && slices.Contains(values, f.name(node)) {
			on = append(on, pv)
		}
	}
	return on
}

func (f *fixture) nodeHas(node, what string, check func(pv *corev1.PersistentVolume) bool) {
	f.Helper()
	kubetest.Eventually(f.T, "node "+node+" "+what, func(ctx context.Context) error {
		on := f.volumesOn(ctx, node)
		for _, pv := range on {
			if !check(&pv) {
				return fmt.Errorf("%v", pv.Annotations)
			}
		}
		if len(on) == 0 {
			return errors.New("it has no volume")
		}
		return nil
	})
}

// nodeMissing waits until a node is recorded as missing.
func (f *fixture) nodeMissing(node string) { f.Helper(); f.nodeHas(node, "is missing", f.isMissing) }

// nodeHeld waits until the cleanup of a node is held.
func (f *fixture) nodeHeld(node string) {
	f.Helper()
	f.nodeHas(node, "is held", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.hold] == heldByBreak })
}

// nodeApproved approves the cleanup of a node.
func (f *fixture) nodeApproved(node string) { f.Helper(); f.approve(f.name(node), "") }

// observed waits until the controller has a bound volume in its caches.
func (f *fixture) observed(name string) { f.Helper(); f.seen("pv-"+name, placeHealthy) }
