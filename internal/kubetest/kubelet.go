// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corev1listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// NodeSpec describes a node for [CreateNode].
type NodeSpec struct {
	Name   string
	Labels map[string]string
	// Driver is registered on the node, as NodeID and with TopologyKeys; "" for none.
	Driver       string
	NodeID       string // empty means the name
	TopologyKeys []string
}

// CreateNode creates a Node that is ready for pods, and its CSINode.
func CreateNode(ctx context.Context, client kubernetes.Interface, spec NodeSpec) error {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: spec.Name, Labels: spec.Labels,
			Annotations: map[string]string{"volumes.kubernetes.io/controller-managed-attach-detach": "true"}},
	}
	node, err := client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("making node %q: %w", spec.Name, err)
	}
	node.Status = corev1.NodeStatus{
		Capacity: corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("256Gi"),
			corev1.ResourcePods: resource.MustParse("500"),
		},
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Simulated"}},
	}
	node.Status.Allocatable = node.Status.Capacity
	if _, err := client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("making node %q ready: %w", spec.Name, err)
	}
	csiNode := &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: spec.Name}}
	if spec.Driver != "" {
		id := spec.NodeID
		if id == "" {
			id = spec.Name
		}
		csiNode.Spec.Drivers = []storagev1.CSINodeDriver{{Name: spec.Driver, NodeID: id, TopologyKeys: spec.TopologyKeys}}
	}
	if _, err := client.StorageV1().CSINodes().Create(ctx, csiNode, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("making CSINode %q: %w", spec.Name, err)
	}
	return nil
}

// Kubelets simulates the kubelets of all nodes: pods run once their volumes are attached, and are
// removed once they have a deletionTimestamp.
type Kubelets struct {
	Client kubernetes.Interface
	// Stopped reports whether the kubelet of a node is stopped. Nil means that all kubelets run.
	Stopped func(node string) bool
}

// Run simulates the kubelets until ctx ends.
func (k Kubelets) Run(ctx context.Context) {
	factory := informers.NewSharedInformerFactory(k.Client, 0)
	pods := factory.Core().V1().Pods()
	attachments := factory.Storage().V1().VolumeAttachments()
	claims := factory.Core().V1().PersistentVolumeClaims()
	wake := make(chan struct{}, 1)
	poke := func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { poke() }, UpdateFunc: func(any, any) { poke() }, DeleteFunc: func(any) { poke() },
	}
	for _, i := range []cache.SharedIndexInformer{pods.Informer(), attachments.Informer(), claims.Informer()} {
		if _, err := i.AddEventHandler(handler); err != nil {
			panic(err) // a new informer cannot refuse
		}
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	factory.WaitForCacheSync(ctx.Done())
	again := time.NewTicker(time.Second) // retries requests that failed while the API server was unavailable
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-wake:
		case <-again.C:
		}
		list, _ := pods.Lister().List(labels.Everything())
		vas, _ := attachments.Lister().List(labels.Everything())
		k.play(ctx, list, attached(vas), claims.Lister())
	}
}

// play starts and removes pods once.
func (k Kubelets) play(ctx context.Context, pods []*corev1.Pod, attached map[string]bool,
	claims corev1listers.PersistentVolumeClaimLister) {
	var wg sync.WaitGroup
	for _, pod := range pods {
		switch {
		case pod.Spec.NodeName == "", k.Stopped != nil && k.Stopped(pod.Spec.NodeName):
		case pod.DeletionTimestamp != nil:
			wg.Go(func() { k.remove(ctx, pod) })
		case pod.Status.Phase == corev1.PodPending && hasVolumes(pod, attached, claims):
			wg.Go(func() { k.start(ctx, pod) })
		}
	}
	wg.Wait()
}

// attached returns the set of attached volumes as node/volume.
func attached(attachments []*storagev1.VolumeAttachment) map[string]bool {
	found := map[string]bool{}
	for _, va := range attachments {
		if va.Status.Attached && va.DeletionTimestamp == nil && va.Spec.Source.PersistentVolumeName != nil {
			found[va.Spec.NodeName+"/"+*va.Spec.Source.PersistentVolumeName] = true
		}
	}
	return found
}

// hasVolumes reports whether all volumes of pod are attached to its node.
func hasVolumes(pod *corev1.Pod, attached map[string]bool, claims corev1listers.PersistentVolumeClaimLister) bool {
	for _, v := range pod.Spec.Volumes {
		if v.PersistentVolumeClaim == nil {
			continue
		}
		claim, err := claims.PersistentVolumeClaims(pod.Namespace).Get(v.PersistentVolumeClaim.ClaimName)
		if err != nil || !attached[pod.Spec.NodeName+"/"+claim.Spec.VolumeName] {
			return false
		}
	}
	return true
}

// remove deletes a pod without grace period. A failure is retried in the next round.
func (k Kubelets) remove(ctx context.Context, pod *corev1.Pod) {
	_ = k.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To[int64](0), Preconditions: &metav1.Preconditions{UID: &pod.UID},
	})
}

// start sets the status of a pod to running. A failure is retried in the next round.
func (k Kubelets) start(ctx context.Context, pod *corev1.Pod) {
	patch := []byte(
		`{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"},{"type":"ContainersReady","status":"True"}]}}`)
	_, _ = k.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
}

// Running counts the pods of a list that run and are ready.
func Running(pods []corev1.Pod) int {
	n := 0
	for _, p := range pods {
		if p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}) {
			n++
		}
	}
	return n
}
