// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// requestRounds is how often each kind of request is measured. The cheapest round counts, because everything else
// on the machine only adds to the cost.
const requestRounds = 3

// requestCost is what one request of a kind costs.
type requestCost struct {
	Request          string  `json:"request"`
	APIServerSeconds float64 `json:"kubeAPIServerCPUSeconds"`
	EtcdSeconds      float64 `json:"etcdCPUSeconds"`
}

// requestCosts is the result of --requests.
type requestCosts []requestCost

func (c requestCosts) table(out io.Writer) {
	w := tabwriter.NewWriter(out, 0, 0, 1, ' ', 0)
	fmt.Fprintln(w, "| request\t| kube-apiserver ms\t| etcd ms\t|")
	fmt.Fprintln(w, "|---\t|---\t|---\t|")
	for _, r := range c {
		fmt.Fprintf(w, "| %s\t| %.2f\t| %.2f\t|\n", r.Request, r.APIServerSeconds*1000, r.EtcdSeconds*1000)
	}
	w.Flush()
}

// requestBench sends requests of one kind after the other to an API server that has nothing else to do.
type requestBench struct {
	*bench
	json  kubernetes.Interface // the same client with JSON instead of protobuf
	round int
	turn  int // changes with each kind of request, so that each writes something new

	volumes     []*corev1.PersistentVolume
	attachments []*storagev1.VolumeAttachment
	leases      []string // their resourceVersions
}

// measureRequests measures the CPU of the API server and of etcd per request, for each kind of request that a
// controller could send.
func measureRequests(ctx context.Context, o options) (requestCosts, error) {
	ctx, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	set, err := setUp(ctx, o, kubetest.Config{})
	if err != nil {
		return nil, err
	}
	defer set.tearDown()
	b := &requestBench{bench: set}
	cfg := set.cp.Config()
	cfg.UserAgent = userAgent
	if b.json, err = kubernetes.NewForConfig(cfg); err != nil {
		return nil, err
	}
	if _, err := b.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	var costs requestCosts
	for b.round = range requestRounds {
		round, err := b.measure(ctx)
		if err != nil {
			return nil, err
		}
		if costs == nil {
			costs = round
		}
		for i, c := range round {
			if c.APIServerSeconds+c.EtcdSeconds < costs[i].APIServerSeconds+costs[i].EtcdSeconds {
				costs[i] = c
			}
		}
	}
	return costs, nil
}

// kind is a kind of request, and how to send it for the object with a number.
type kind struct {
	name string
	do   func(ctx context.Context, i int) error
}

// measure sends o.volumes requests of each kind.
func (b *requestBench) measure(ctx context.Context) (costs requestCosts, err error) {
	b.volumes = make([]*corev1.PersistentVolume, b.o.volumes)
	b.attachments = make([]*storagev1.VolumeAttachment, b.o.volumes)
	b.leases = make([]string, b.o.volumes)
	for _, k := range b.kinds() {
		b.turn++
		if err := pause(ctx, 200*time.Millisecond); err != nil { // for what the last kind has caused
			return nil, err
		}
		begin := b.begin()
		if err := each(ctx, b.o.volumes, k.do); err != nil {
			return nil, fmt.Errorf("%s: %w", k.name, err)
		}
		end := b.begin()
		n := float64(b.o.volumes)
		costs = append(costs, requestCost{k.name, (end.api - begin.api) / n, (end.etcd - begin.etcd) / n})
	}
	return costs, nil
}

// kinds returns the requests in an order in which each finds what it needs.
func (b *requestBench) kinds() []kind {
	volumes, events := b.client.CoreV1().PersistentVolumes(), b.client.CoreV1().Events(namespace)
	leases := b.client.CoordinationV1().Leases(namespace)
	kinds := []kind{
		{"create PersistentVolume, protobuf", func(ctx context.Context, i int) (err error) {
			b.volumes[i], err = volumes.Create(ctx, b.volume("a", i), metav1.CreateOptions{})
			return err
		}},
		{"create PersistentVolume, JSON", func(ctx context.Context, i int) error {
			_, err := b.json.CoreV1().PersistentVolumes().Create(ctx, b.volume("b", i), metav1.CreateOptions{})
			return err
		}},
		{"get PersistentVolume", func(ctx context.Context, i int) error {
			_, err := volumes.Get(ctx, b.volumes[i].Name, metav1.GetOptions{})
			return err
		}},
	}
	kinds = append(kinds, b.volumeWrites()...)
	kinds = append(kinds, b.attachmentWrites()...)
	return append(kinds,
		kind{"delete PersistentVolume", func(ctx context.Context, i int) error {
			return volumes.Delete(ctx, b.volume("b", i).Name, metav1.DeleteOptions{})
		}},
		kind{"delete PersistentVolume with the UID", func(ctx context.Context, i int) error {
			uid := &metav1.Preconditions{UID: &b.volumes[i].UID}
			return volumes.Delete(ctx, b.volumes[i].Name, metav1.DeleteOptions{Preconditions: uid})
		}},
		kind{"create Event", func(ctx context.Context, i int) error {
			_, err := events.Create(ctx, b.event(i), metav1.CreateOptions{})
			return err
		}},
		kind{"create Lease", func(ctx context.Context, i int) error {
			lease, err := leases.Create(ctx, b.lease(i), metav1.CreateOptions{})
			b.leases[i] = lease.ResourceVersion
			return err
		}},
		kind{"update Lease, protobuf", func(ctx context.Context, i int) error {
			lease := b.lease(i)
			lease.ResourceVersion = b.leases[i]
			_, err := leases.Update(ctx, lease, metav1.UpdateOptions{})
			return err
		}},
	)
}

// volumeWrites replaces the finalizers of PersistentVolumes, as they are replaced after DeleteVolume.
func (b *requestBench) volumeWrites() []kind {
	volumes := b.client.CoreV1().PersistentVolumes()
	patch := func(pt types.PatchType, data func(pv *corev1.PersistentVolume) ([]byte, error)) func(context.Context, int) error {
		return func(ctx context.Context, i int) error {
			body, err := data(b.volumes[i])
			if err != nil {
				return err
			}
			b.volumes[i], err = volumes.Patch(ctx, b.volumes[i].Name, pt, body, metav1.PatchOptions{})
			return err
		}
	}
	update := func(client kubernetes.Interface) func(context.Context, int) error {
		return func(ctx context.Context, i int) (err error) {
			b.volumes[i].Finalizers = []string{b.finalizer()}
			b.volumes[i], err = client.CoreV1().PersistentVolumes().Update(ctx, b.volumes[i], metav1.UpdateOptions{})
			return err
		}
	}
	merge := func(pv *corev1.PersistentVolume) ([]byte, error) {
		return json.Marshal(map[string]any{"metadata": map[string]any{"uid": pv.UID, "resourceVersion": pv.ResourceVersion,
			"finalizers": []string{b.finalizer()}}})
	}
	strategic := func(pv *corev1.PersistentVolume) ([]byte, error) {
		return json.Marshal(map[string]any{"metadata": map[string]any{"uid": pv.UID, "finalizers": []string{b.finalizer()},
			"$deleteFromPrimitiveList/finalizers": pv.Finalizers}})
	}
	return []kind{
		{"JSON patch of PersistentVolume", patch(types.JSONPatchType, func(pv *corev1.PersistentVolume) ([]byte, error) {
			return finalizersPatch(pv, b.finalizer())
		})},
		{"merge patch of PersistentVolume", patch(types.MergePatchType, merge)},
		{"strategic merge patch of PersistentVolume", patch(types.StrategicMergePatchType, strategic)},
		{"update PersistentVolume, protobuf", update(b.client)},
		{"update PersistentVolume, JSON", update(b.json)},
		{"patch of PersistentVolume without finalizers", patch(types.JSONPatchType, func(pv *corev1.PersistentVolume) ([]byte, error) {
			return finalizersPatch(pv)
		})},
	}
}

// finalizersPatch returns the JSON patch with which the controllers replace the finalizers of obj.
func finalizersPatch(obj metav1.Object, want ...string) ([]byte, error) {
	const path = "/metadata/finalizers"
	patch := []map[string]any{{"op": "test", "path": "/metadata/uid", "value": obj.GetUID()}}
	switch have := obj.GetFinalizers(); {
	case len(have) == 0:
		patch = append(patch, map[string]any{"op": "add", "path": path, "value": want})
	case len(want) == 0:
		patch = append(patch, map[string]any{"op": "test", "path": path, "value": have}, map[string]any{"op": "remove", "path": path})
	default:
		patch = append(patch, map[string]any{"op": "test", "path": path, "value": have},
			map[string]any{"op": "replace", "path": path, "value": want})
	}
	return json.Marshal(patch)
}

// attachmentWrites adds a finalizer to VolumeAttachments and changes their status, as for an attach.
func (b *requestBench) attachmentWrites() []kind {
	attachments := b.client.StorageV1().VolumeAttachments()
	status := func(pt types.PatchType, body string, args ...any) func(context.Context, int) error {
		return func(ctx context.Context, i int) (err error) {
			va := b.attachments[i]
			data := fmt.Appendf(nil, body, append([]any{va.UID}, args...)...)
			b.attachments[i], err = attachments.Patch(ctx, va.Name, pt, data, metav1.PatchOptions{}, "status")
			return err
		}
	}
	finalizers := func(want ...func() string) func(context.Context, int) error {
		return func(ctx context.Context, i int) error {
			var values []string
			for _, w := range want {
				values = append(values, w())
			}
			data, err := finalizersPatch(b.attachments[i], values...)
			if err != nil {
				return err
			}
			b.attachments[i], err = attachments.Patch(ctx, b.attachments[i].Name, types.JSONPatchType, data, metav1.PatchOptions{})
			return err
		}
	}
	return []kind{
		{"create VolumeAttachment", func(ctx context.Context, i int) (err error) {
			b.attachments[i], err = attachments.Create(ctx, &storagev1.VolumeAttachment{
				ObjectMeta: metav1.ObjectMeta{Name: b.volumes[i].Name},
				Spec: storagev1.VolumeAttachmentSpec{Attacher: b.driver, NodeName: node(i % b.o.nodes),
					Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &b.volumes[i].Name}},
			}, metav1.CreateOptions{})
			return err
		}},
		{"JSON patch of VolumeAttachment", finalizers(b.finalizer)},
		{"update VolumeAttachment, protobuf", func(ctx context.Context, i int) (err error) {
			b.attachments[i].Annotations = map[string]string{"csi.alpha.kubernetes.io/node-id": node(i)}
			b.attachments[i], err = attachments.Update(ctx, b.attachments[i], metav1.UpdateOptions{})
			return err
		}},
		{"merge patch of VolumeAttachment status", status(types.MergePatchType, `{"metadata":{"uid":%q},"status":{"attached":true}}`)},
		{"JSON patch of VolumeAttachment status", status(types.JSONPatchType, `[{"op":"test","path":"/metadata/uid","value":%q},`+
			`{"op":"replace","path":"/status/attached","value":false}]`)},
		{"update VolumeAttachment status, protobuf", func(ctx context.Context, i int) (err error) {
			b.attachments[i].Status.Attached = true
			b.attachments[i], err = attachments.UpdateStatus(ctx, b.attachments[i], metav1.UpdateOptions{})
			return err
		}},
		{"patch of VolumeAttachment without finalizers", finalizers()},
		{"delete VolumeAttachment", func(ctx context.Context, i int) error {
			return attachments.Delete(ctx, b.attachments[i].Name, metav1.DeleteOptions{})
		}},
	}
}

// finalizer returns the finalizer that the requests of one kind write.
func (b *requestBench) finalizer() string { return fmt.Sprintf("external-attacher/bench-%d", b.turn) }

func (b *requestBench) volume(set string, i int) *corev1.PersistentVolume {
	name := fmt.Sprintf("%s-%d-%d", set, b.round, i)
	return persistentVolume(b.driver, name, claim(name), "external-provisioner.volume.kubernetes.io/finalizer", b.finalizer())
}

func (b *requestBench) event(i int) *corev1.Event {
	now := metav1.Now()
	return &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("event-%d-%d", b.round, i)},
		InvolvedObject: corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: namespace,
			Name: fmt.Sprintf("claim-%d", i), UID: "0e5a52f2-7e2b-4c49-b2a1-5a9a5ae2f6d1", ResourceVersion: "12345"},
		Reason: "ProvisioningSucceeded", Message: "Successfully provisioned volume pvc-0e5a52f2-7e2b-4c49-b2a1-5a9a5ae2f6d1",
		Type: corev1.EventTypeNormal, Count: 1, FirstTimestamp: now, LastTimestamp: now,
		Source: corev1.EventSource{Component: b.driver + "_controller-0_0e5a52f2-7e2b-4c49-b2a1-5a9a5ae2f6d1"},
	}
}

func (b *requestBench) lease(i int) *coordinationv1.Lease {
	now := metav1.NowMicro()
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("lease-%d-%d", b.round, i)},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("controller-0"), LeaseDurationSeconds: ptr.To[int32](15),
			AcquireTime: &now, RenewTime: &now},
	}
}
