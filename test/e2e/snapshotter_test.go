// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// snapshotting is a driver with volumes and snapshots.
func snapshotting() csitest.Config {
	return csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
	}}
}

// snapshotterLease is the name that the Lease of csi-snapshotter has.
func (e *env) snapshotterLease() string { return "external-snapshotter-leader-" + e.provisionerLease() }

// snapshotClass makes the VolumeSnapshotClass of the driver.
func (e *env) snapshotClass() {
	e.t.Helper()
	_, err := e.snapshots().VolumeSnapshotClasses().Create(e.t.Context(), &snapshotv1.VolumeSnapshotClass{
		ObjectMeta: metav1.ObjectMeta{Name: e.ns}, Driver: e.plugin.Name(), DeletionPolicy: snapshotv1.VolumeSnapshotContentDelete,
	}, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
}

// snapshotContent makes a VolumeSnapshotContent of a volume, as the snapshot-controller does.
func (e *env) snapshotContent(name string) {
	e.t.Helper()
	_, err := e.snapshots().VolumeSnapshotContents().Create(e.t.Context(), &snapshotv1.VolumeSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{Name: e.ns + "-" + name},
		Spec: snapshotv1.VolumeSnapshotContentSpec{
			VolumeSnapshotRef: corev1.ObjectReference{Kind: "VolumeSnapshot", Namespace: e.ns, Name: name, UID: types.UID(name)},
			DeletionPolicy:    snapshotv1.VolumeSnapshotContentDelete, Driver: e.plugin.Name(), VolumeSnapshotClassName: ptr.To(e.ns),
			Source: snapshotv1.VolumeSnapshotContentSource{VolumeHandle: ptr.To(e.plugin.AddVolume(name, 1<<30))},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
}

// snapshotReady waits until a VolumeSnapshotContent is ready.
func (e *env) snapshotReady(name string) {
	e.t.Helper()
	e.eventually("the snapshot "+name+" is ready", func(ctx context.Context) error {
		o, err := e.snapshots().VolumeSnapshotContents().Get(ctx, e.ns+"-"+name, metav1.GetOptions{})
		if err == nil && (o.Status == nil || !ptr.Deref(o.Status.ReadyToUse, false)) {
			err = errors.New("it is not")
		}
		return err
	})
}

// removeSnapshotCRDs deletes the CRDs of snapshots, as an administrator does who also removes the
// finalizers of the objects.
func (e *env) removeSnapshotCRDs() {
	e.t.Helper()
	crds := func(group string) string {
		return "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/" + group
	}
	rest := e.client.Discovery().RESTClient()
	for _, kind := range kubetest.SnapshotCRDs {
		group, plural, _ := strings.Cut(kind, "_")
		if err := rest.Delete().AbsPath(crds(plural + "." + group)).Do(e.t.Context()).Error(); err != nil {
			e.t.Fatal(err)
		}
	}
	e.eventually("the CRDs are removed", func(ctx context.Context) error {
		contents := e.snapshots().VolumeSnapshotContents()
		list, err := contents.List(ctx, metav1.ListOptions{})
		if err == nil {
			for _, o := range list.Items {
				_, err := contents.Patch(ctx, o.Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`),
					metav1.PatchOptions{})
				if err != nil && !apierrors.IsNotFound(err) {
					return err
				}
			}
		}
		for _, kind := range kubetest.SnapshotCRDs {
			group, plural, _ := strings.Cut(kind, "_")
			if err := rest.Get().AbsPath(crds(plural + "." + group)).Do(ctx).Error(); !apierrors.IsNotFound(err) {
				return fmt.Errorf("%s: %v", kind, err)
			}
		}
		return nil
	})
}

func TestSnapshotterScenarioProcess(t *testing.T) {
	t.Parallel()
	t.Run("076_077_CRDs_come_and_go", func(t *testing.T) {
		t.Parallel()
		kubetest.NeedReal(t)
		cp, err := kubetest.Start(t.Context(), kubetest.Config{ControllerManager: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(cp.Stop)
		e := newEnvOn(t, cp, snapshotting(), 0)
		p := e.run("all", "--leader-election", "--http-endpoint=127.0.0.1:0")
		e.ready(p, "snapshotter idle: ", "volumesnapshotcontents.snapshot.storage.k8s.io are not served")
		e.claim("c", e.class(false, nil))
		e.bound("c")
		if _, err := e.lease(t.Context(), e.snapshotterLease()); !apierrors.IsNotFound(err) {
			t.Errorf("the Lease of an idle role: %v", err)
		}
		e.must(cp.InstallCRDs(t.Context()))
		e.snapshotClass()
		e.snapshotContent("v1")
		e.snapshotReady("v1")
		e.leads(p, e.snapshotterLease())
		e.removeSnapshotCRDs()
		e.ready(p, "snapshotter idle: ")
		e.eventually("the Lease is released", func(ctx context.Context) error {
			lease, err := e.lease(ctx, e.snapshotterLease())
			if err == nil && ptr.Deref(lease.Spec.HolderIdentity, "") != "" {
				err = errors.New("it is held")
			}
			return err
		})
		e.calls("DeleteSnapshot", 0)
		if strings.Contains(p.logged(), "level=error") || strings.Contains(p.logged(), "\nE") {
			t.Error("errors were logged")
		}
		e.must(cp.InstallCRDs(t.Context()))
		e.snapshotClass()
		e.snapshotContent("v2")
		e.snapshotReady("v2")
		e.calls("CreateSnapshot", 2)
		p.lives()
	})
	t.Run("078_two_replicas", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, snapshotting(), 0)
		kubetest.InstallCRDs(t, e.cp)
		e.snapshotClass()
		args := []string{"--leader-election", "--leader-election-retry-period=1s"}
		first, second := e.run("snapshot", args...), e.run("snapshot", args...)
		if lease := e.somebodyLeads(e.snapshotterLease()); *lease.Spec.HolderIdentity == second.pod {
			first, second = second, first
		}
		e.plugin.Next("CreateSnapshot", csitest.Hang())
		e.snapshotContent("v1")
		e.wait("CreateSnapshot", 1)
		first.signal(syscall.SIGTERM)
		first.says("Shutting down")
		e.plugin.Release()
		if code := first.code(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		o, err := e.snapshots().VolumeSnapshotContents().Get(t.Context(), e.ns+"-v1", metav1.GetOptions{})
		if err != nil || o.Status == nil || !ptr.Deref(o.Status.ReadyToUse, false) {
			t.Errorf("the result was not written: %v, %+v", err, o)
		}
		ended := time.Now()
		taken := e.leads(second, e.snapshotterLease())
		if took := taken.Spec.AcquireTime.Sub(ended); took >= 14*time.Second { // the Lease is valid for 15s
			t.Errorf("taken over after %v", took)
		}
		e.snapshotContent("v2")
		e.snapshotReady("v2")
		e.calls("CreateSnapshot", 2)
	})
	t.Run("079_flags", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, snapshotting(), 0)
		for text, args := range map[string][]string{
			"--node-deployment and --leader-election":     {"--node-deployment", "--leader-election"},
			"--node-deployment: the environment variable": {"--node-deployment"},
			"--snapshot-name-uuid-length":                 {"--snapshot-name-uuid-length=33"},
			"--groupsnapshot-name-prefix":                 {"--groupsnapshot-name-prefix="},
			"--worker-threads":                            {"--worker-threads=0"},
		} {
			e.refuses(e.command("snapshot", args...), text)
		}
	})
	t.Run("driver_without_snapshots", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, csitest.Config{}, 0)
		e.run("snapshot").fails("CREATE_DELETE_SNAPSHOT")
	})
	t.Run("under_the_name_of_the_sidecar", func(t *testing.T) {
		t.Parallel()
		e := newEnv(t, snapshotting(), 0)
		kubetest.InstallCRDs(t, e.cp)
		e.snapshotClass()
		p := e.start(e.linked("csi-snapshotter", "-http-endpoint=127.0.0.1:0", "-snapshot-name-prefix=p"))
		e.snapshotContent("v1")
		e.snapshotReady("v1")
		if name := e.plugin.Snapshots()[0].Name; name != "p-v1" {
			t.Errorf("name %q", name)
		}
		if status, body := p.get("/metrics"); status != http.StatusOK || !strings.Contains(body, `name="csi-snapshotter-content"`) ||
			!strings.Contains(body, `method_name="/csi.v1.Controller/CreateSnapshot"`) {
			t.Errorf("%d: %s", status, body)
		}
	})
}
