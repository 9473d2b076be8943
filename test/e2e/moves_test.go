// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// move is the story of a pod with a volume that has to run on another node, with the
// real attach-detach controller.
type move struct {
	*env
	dead sync.Map // nodes whose kubelet does nothing any more
	from string
}

// newMove has one pod of a StatefulSet run.
func newMove(t *testing.T) *move {
	t.Parallel()
	m := &move{env: newEnv(t, csitest.Config{}, 2)}
	class := m.class(false, nil)
	m.run("all", quick...)
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		kubetest.Kubelets{Client: m.client, Stopped: func(node string) bool { _, dead := m.dead.Load(node); return dead }}.Run(ctx)
	})
	t.Cleanup(func() { stop(); wg.Wait() })
	m.statefulSet("web", class, 1)
	m.running("web", 1)
	m.from = m.pod().Spec.NodeName
	m.eventually("the attach-detach controller knows that the volume is attached", func(ctx context.Context) error {
		node, err := m.client.CoreV1().Nodes().Get(ctx, m.from, metav1.GetOptions{})
		if err == nil && len(node.Status.VolumesAttached) == 0 {
			err = errors.New("its node does not say so")
		}
		return err
	})
	return m
}

func (m *move) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *move) pod() *corev1.Pod {
	m.t.Helper()
	pod, err := m.client.CoreV1().Pods(m.ns).Get(m.t.Context(), "web-0", metav1.GetOptions{})
	m.must(err)
	return pod
}

func (m *move) deletePod(options metav1.DeleteOptions) {
	m.t.Helper()
	m.must(m.client.CoreV1().Pods(m.ns).Delete(m.t.Context(), "web-0", options))
}

func (m *move) patchNode(kind types.PatchType, patch string, subresources ...string) {
	m.t.Helper()
	_, err := m.client.CoreV1().Nodes().Patch(m.t.Context(), m.from, kind, []byte(patch), metav1.PatchOptions{}, subresources...)
	m.must(err)
}

// mounted has the node say that the volume is in use there, as its kubelet would.
func (m *move) mounted() {
	m.t.Helper()
	name := fmt.Sprintf("kubernetes.io/csi/%s^%s", m.plugin.Name(), m.plugin.Volumes()[0].ID)
	m.patchNode(types.MergePatchType, fmt.Sprintf(`{"status":{"volumesInUse":[%q]}}`, name), "status")
}

// ended waits until the pod runs on the other node, and checks that the driver saw each
// publish and unpublish once, in this order.
func (m *move) ended() {
	m.t.Helper()
	m.eventually("the pod runs on the other node", func(ctx context.Context) error {
		pod, err := m.client.CoreV1().Pods(m.ns).Get(ctx, "web-0", metav1.GetOptions{})
		switch {
		case err != nil:
			return err
		case pod.Spec.NodeName == "":
			return fmt.Errorf("it is not scheduled: %v", pod.Status.Conditions)
		case pod.Spec.NodeName == m.from:
			return errors.New("it is on the old one")
		case kubetest.Running([]corev1.Pod{*pod}) != 1:
			return fmt.Errorf("it is %s on %q", pod.Status.Phase, pod.Spec.NodeName)
		}
		return nil
	})
	m.attached(1)
	var nodes []string
	for _, c := range m.plugin.Calls("ControllerPublishVolume", "ControllerUnpublishVolume") {
		switch r := c.Request.(type) {
		case *csi.ControllerPublishVolumeRequest:
			nodes = append(nodes, "+"+m.nodeOf(r.NodeId))
		case *csi.ControllerUnpublishVolumeRequest:
			nodes = append(nodes, "-"+m.nodeOf(r.NodeId))
		}
	}
	other := m.nodes[0]
	if other == m.from {
		other = m.nodes[1]
	}
	if got, want := strings.Join(nodes, " "), fmt.Sprintf("+%s -%s +%s", m.from, m.from, other); got != want {
		m.t.Errorf("calls %s, want %s", got, want)
	}
	m.deleteStatefulSet("web")
	m.attached(0)
	m.leftovers("data-web-0")
}

func (m *move) nodeOf(id string) string { return m.nodes[int(id[len(id)-1]-'0')] }

func TestPodMoves(t *testing.T) {
	t.Run("from a node that is cordoned", func(t *testing.T) {
		m := newMove(t)
		m.patchNode(types.MergePatchType, `{"spec":{"unschedulable":true}}`)
		m.deletePod(metav1.DeleteOptions{})
		m.ended()
	})
	t.Run("from a node that is removed", func(t *testing.T) {
		m := newMove(t)
		m.dead.Store(m.from, true)
		// Kubernetes believes a volume to be mounted until the node says something.
		m.patchNode(types.MergePatchType, `{"metadata":{"labels":{"said":"something"}}}`)
		m.must(m.client.CoreV1().Nodes().Delete(t.Context(), m.from, metav1.DeleteOptions{}))
		m.must(m.client.StorageV1().CSINodes().Delete(t.Context(), m.from, metav1.DeleteOptions{}))
		m.deletePod(metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)})
		m.ended()
	})
	t.Run("from a node that is out of service, by force", func(t *testing.T) {
		m := newMove(t)
		m.mounted()
		m.dead.Store(m.from, true)
		m.patchNode(types.StrategicMergePatchType,
			`{"status":{"conditions":[{"type":"Ready","status":"Unknown","reason":"NodeStatusUnknown"}]}}`, "status")
		m.patchNode(types.MergePatchType, `{"spec":{"unschedulable":true}}`)
		m.deletePod(metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)})
		m.calls("ControllerUnpublishVolume", 0) // it may still write to it
		m.patchNode(types.StrategicMergePatchType,
			`{"spec":{"taints":[{"key":"node.kubernetes.io/out-of-service","value":"nodeshutdown","effect":"NoExecute"}]}}`)
		m.ended()
	})
}

// TestSecondNodeIsRefused has a volume for one node attached to one, though pods of two
// want it.
func TestSecondNodeIsRefused(t *testing.T) {
	m := newMove(t)
	other := m.nodes[0]
	if other == m.from {
		other = m.nodes[1]
	}
	_, err := m.client.CoreV1().Pods(m.ns).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "second"},
		Spec: corev1.PodSpec{
			NodeName: other, TerminationGracePeriodSeconds: ptr.To[int64](0), Containers: []corev1.Container{{Name: "c", Image: "none"}},
			Volumes: []corev1.Volume{{Name: "v",
				VolumeSource: corev1.VolumeSource{
					PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data-web-0"},
				}}},
		},
	}, metav1.CreateOptions{})
	m.must(err)
	m.eventually("Kubernetes says that the volume is elsewhere", func(ctx context.Context) error {
		events, err := m.client.CoreV1().Events(m.ns).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=second"})
		if err != nil {
			return err
		}
		for _, e := range events.Items {
			if strings.Contains(e.Message, "Multi-Attach") {
				return nil
			}
		}
		return fmt.Errorf("%d other events", len(events.Items))
	})
	m.attached(1)
	m.calls("ControllerPublishVolume", 1)
	m.scale("web", 0) // then it is the turn of the second
	m.eventually("the second pod runs", func(ctx context.Context) error {
		pod, err := m.client.CoreV1().Pods(m.ns).Get(ctx, "second", metav1.GetOptions{})
		if err == nil && kubetest.Running([]corev1.Pod{*pod}) != 1 {
			err = fmt.Errorf("it is %s", pod.Status.Phase)
		}
		return err
	})
	m.calls("ControllerPublishVolume", 2)
	m.calls("ControllerUnpublishVolume", 1)
	var vas []storagev1.VolumeAttachment
	vas, err = m.attachments(t.Context())
	m.must(err)
	if len(vas) != 1 || vas[0].Spec.NodeName != other {
		t.Errorf("%d attachments", len(vas))
	}
	m.must(m.client.CoreV1().Pods(m.ns).Delete(t.Context(), "second", metav1.DeleteOptions{}))
	m.attached(0)
	m.deleteStatefulSet("web")
	m.leftovers("data-web-0")
}
