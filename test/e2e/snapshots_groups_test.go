// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"

	groupv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	groupclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/typed/volumegroupsnapshot/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// groupSnapshot is the kind of group snapshots, here of one volume.
var groupSnapshot = func() snapshotKind {
	k := snapshotKind{
		config: snapshotting(), create: "CreateVolumeGroupSnapshot", remove: "DeleteVolumeGroupSnapshot", class: (*env).groupClass,
		take: (*env).takeGroupSnapshot, ready: (*env).groupSnapshotReady, delete: func(e *env) {
			e.t.Helper()
			e.must(e.groups().VolumeGroupSnapshots(e.ns).Delete(e.t.Context(), "s", metav1.DeleteOptions{}))
		}, contents: (*env).groupContents,
	}
	k.config.Groups = true
	return k
}()

func (e *env) groups() groupclient.GroupsnapshotV1Interface {
	e.t.Helper()
	client, err := groupclient.NewForConfig(kube.ForCustomResources(e.cp.Config()))
	e.must(err)
	return client
}

// groupClass makes the VolumeGroupSnapshotClass of the driver.
func (e *env) groupClass() {
	e.t.Helper()
	_, err := e.groups().VolumeGroupSnapshotClasses().Create(e.t.Context(), &groupv1.VolumeGroupSnapshotClass{
		ObjectMeta: metav1.ObjectMeta{Name: e.ns}, Driver: e.plugin.Name(), DeletionPolicy: snapshotv1.VolumeSnapshotContentDelete,
	}, metav1.CreateOptions{})
	e.must(err)
}

// takeGroupSnapshot makes a VolumeGroupSnapshot s of the claims with label group=s.
func (e *env) takeGroupSnapshot() {
	e.t.Helper()
	_, err := e.groups().VolumeGroupSnapshots(e.ns).Create(e.t.Context(), &groupv1.VolumeGroupSnapshot{
		ObjectMeta: metav1.ObjectMeta{Name: "s"},
		Spec: groupv1.VolumeGroupSnapshotSpec{VolumeGroupSnapshotClassName: &e.ns, Source: groupv1.VolumeGroupSnapshotSource{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"group": "s"}},
		}},
	}, metav1.CreateOptions{})
	e.must(err)
}

// groupSnapshotReady waits until the group snapshot and its member are ready.
func (e *env) groupSnapshotReady() {
	e.t.Helper()
	e.eventually("the group snapshot is ready", func(ctx context.Context) error {
		s, err := e.groups().VolumeGroupSnapshots(e.ns).Get(ctx, "s", metav1.GetOptions{})
		if err != nil {
			return err
		}
		members, err := e.snapshots().VolumeSnapshots(e.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if s.Status == nil || !ptr.Deref(s.Status.ReadyToUse, false) || len(members.Items) != 1 || members.Items[0].Status == nil ||
			!ptr.Deref(members.Items[0].Status.ReadyToUse, false) {
			return fmt.Errorf("its status is %+v, its members %+v", s.Status, members.Items)
		}
		return nil
	})
}

// groupContents returns the finalizers of the VolumeGroupSnapshotContents of the driver, by name.
func (e *env) groupContents(ctx context.Context) (map[string][]string, error) {
	list, err := e.groups().VolumeGroupSnapshotContents().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	found := map[string][]string{}
	for _, c := range list.Items {
		if c.Spec.Driver == e.plugin.Name() {
			found[c.Name] = c.Finalizers
		}
	}
	return found, nil
}
