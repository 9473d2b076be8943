// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"testing"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// takeSnapshot makes a VolumeSnapshot of a claim.
func (e *env) takeSnapshot(name, claim string) {
	e.t.Helper()
	_, err := e.snapshots().VolumeSnapshots(e.ns).Create(e.t.Context(), &snapshotv1.VolumeSnapshot{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: snapshotv1.VolumeSnapshotSpec{VolumeSnapshotClassName: &e.ns,
			Source: snapshotv1.VolumeSnapshotSource{PersistentVolumeClaimName: &claim}},
	}, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) deleteSnapshot(name string) {
	e.t.Helper()
	if err := e.snapshots().VolumeSnapshots(e.ns).Delete(e.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		e.t.Fatal(err)
	}
}

// volumeSnapshotReady waits until a snapshot is ready to use.
func (e *env) volumeSnapshotReady(name string) {
	e.t.Helper()
	e.eventually("snapshot "+name+" is ready", func(ctx context.Context) error {
		s, err := e.snapshots().VolumeSnapshots(e.ns).Get(ctx, name, metav1.GetOptions{})
		if err == nil && (s.Status == nil || !ptr.Deref(s.Status.ReadyToUse, false)) {
			err = fmt.Errorf("its status is %+v", s.Status)
		}
		return err
	})
}

// noSnapshots waits until neither the driver nor the API server has a snapshot.
func (e *env) noSnapshots() {
	e.t.Helper()
	e.eventually("there is no snapshot", func(ctx context.Context) error {
		list, err := e.snapshots().VolumeSnapshots(e.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		contents, err := e.contents(ctx)
		if n := len(e.plugin.Snapshots()); err == nil && n+len(list.Items)+len(contents) > 0 {
			err = fmt.Errorf("%d at the driver, %d VolumeSnapshots, contents %v", n, len(list.Items), contents)
		}
		return err
	})
}

// contents returns the finalizers of the VolumeSnapshotContents of the driver, by name.
func (e *env) contents(ctx context.Context) (map[string][]string, error) {
	list, err := e.snapshots().VolumeSnapshotContents().List(ctx, metav1.ListOptions{})
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

// TestSnapshots runs with the snapshot-controller, on a control plane of its own: other tests write what that
// controller would.
func TestSnapshots(t *testing.T) {
	t.Parallel()
	kubetest.NeedReal(t)
	cp, err := kubetest.Start(t.Context(), kubetest.Config{ControllerManager: true, Scheduler: true, Audit: true, SnapshotController: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cp.Stop)
	for name, test := range map[string]func(*testing.T, *kubetest.ControlPlane){
		"counts": testSnapshotCounts, "restore": testSnapshotRestored, "order": testSnapshotDeletedInEveryOrder,
		"killed": singleSnapshot.testSnapshotterKilled, "group_killed": groupSnapshot.testSnapshotterKilled,
		"kube_burner": testKubeBurnerObjects,
	} {
		t.Run(name, func(t *testing.T) { test(t, cp) })
	}
}

// testSnapshotCounts counts calls and writes.
func testSnapshotCounts(t *testing.T, cp *kubetest.ControlPlane) {
	const n = 200
	e := newEnvOn(t, cp, snapshotting(), 0)
	e.run("all")
	e.snapshotClass()
	e.claim("c", e.class(false, nil))
	e.bound("c")
	name := func(i int) string { return fmt.Sprintf("s%d", i) }
	mark := e.mark()
	e.parallel(n, func(i int) { e.takeSnapshot(name(i), "c") })
	for i := range n {
		e.volumeSnapshotReady(name(i))
	}
	e.calls("CreateSnapshot", n)
	if have := len(e.plugin.Snapshots()); have != n {
		t.Errorf("%d snapshots", have)
	}
	const meanwhile = "patch volumesnapshotcontents 422" // the snapshot-controller has added the finalizer
	mark = e.writes(mark, map[string]int{"patch volumesnapshotcontents": 2 * n, "patch volumesnapshotcontents/status": n}, meanwhile)
	e.parallel(n, func(i int) { e.deleteSnapshot(name(i)) })
	e.noSnapshots()
	e.calls("DeleteSnapshot", n)
	e.writes(mark, map[string]int{"patch volumesnapshotcontents": n})
}

// testSnapshotRestored restores a snapshot that is deleted meanwhile.
func testSnapshotRestored(t *testing.T, cp *kubetest.ControlPlane) {
	e := newEnvOn(t, cp, snapshotting(), 0)
	e.run("all", quick...)
	storage := e.class(false, nil)
	e.claim("source", storage)
	e.bound("source")
	e.snapshotClass()
	e.takeSnapshot("snap", "source")
	e.volumeSnapshotReady("snap")
	e.plugin.Next("CreateVolume", csitest.Hang())
	claim := restoreClaim(e)
	claim.Spec.StorageClassName = &storage
	e.make(claim)
	e.wait("CreateVolume", 2)
	e.deleteSnapshot("snap")
	e.plugin.Release()
	e.bound("c")
	e.noSnapshots()
	e.agrees(2)
}

// testSnapshotDeletedInEveryOrder deletes snapshot, class and claim in every order.
func testSnapshotDeletedInEveryOrder(t *testing.T, cp *kubetest.ControlPlane) {
	for _, order := range [][]string{{"snapshot", "class", "claim"}, {"class", "snapshot", "claim"}, {"claim", "snapshot", "class"},
		{"claim", "class", "snapshot"}, {"content", "snapshot"}, {"namespace"}} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			t.Parallel()
			e := newEnvOn(t, cp, snapshotting(), 0)
			e.run("all", quick...)
			e.snapshotClass()
			e.claim("c", e.class(false, nil))
			e.bound("c")
			e.takeSnapshot("s", "c")
			e.volumeSnapshotReady("s")
			for _, what := range order {
				e.deleteOfSnapshot(what)
			}
			e.noSnapshots()
			e.calls("CreateSnapshot", 1)
			e.calls("DeleteSnapshot", 1)
		})
	}
}

func (e *env) deleteOfSnapshot(what string) {
	e.t.Helper()
	ctx := e.t.Context()
	switch what {
	case "snapshot":
		e.deleteSnapshot("s")
	case "class":
		if err := e.snapshots().VolumeSnapshotClasses().Delete(ctx, e.ns, metav1.DeleteOptions{}); err != nil {
			e.t.Fatal(err)
		}
	case "claim":
		e.deleteClaim("c")
	case "content":
		contents, err := e.contents(ctx)
		for name := range contents {
			err = errors.Join(err, e.snapshots().VolumeSnapshotContents().Delete(ctx, name, metav1.DeleteOptions{}))
		}
		if err != nil || len(contents) != 1 {
			e.t.Fatal(contents, err)
		}
	case "namespace":
		if err := e.client.CoreV1().Namespaces().Delete(ctx, e.ns, metav1.DeleteOptions{}); err != nil {
			e.t.Fatal(err)
		}
	}
}

// snapshotKind is a kind of snapshots whose creation and deletion can be interrupted.
type snapshotKind struct {
	config                     csitest.Config
	create, remove             string                                                         // methods of the driver
	class, take, ready, delete func(e *env)                                                   // of the snapshot s of claim c
	contents                   func(e *env, ctx context.Context) (map[string][]string, error) // finalizers by name
}

var singleSnapshot = snapshotKind{
	config: snapshotting(), create: "CreateSnapshot", remove: "DeleteSnapshot", class: (*env).snapshotClass,
	take: func(e *env) { e.takeSnapshot("s", "c") }, ready: func(e *env) { e.volumeSnapshotReady("s") },
	delete: func(e *env) { e.deleteSnapshot("s") }, contents: (*env).contents,
}

// testSnapshotterKilled has no snapshot at the driver without a content, no content that never ends, and no second
// snapshot for one content, whenever the process dies.
func (k snapshotKind) testSnapshotterKilled(t *testing.T, cp *kubetest.ControlPlane) {
	for name, remove := range map[string]bool{"create": false, "delete": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCrash(-1)
			e := k.begin(t, cp, c, remove)
			if remove {
				k.none(e)
			} else {
				k.ready(e)
			}
			c.process.kill()
			c.interrupted(t, func(t *testing.T, at int, _ string) {
				for _, deleted := range []bool{false, true} {
					if remove && !deleted {
						continue
					}
					t.Run(fmt.Sprintf("deleted=%t", deleted), func(t *testing.T) {
						t.Parallel()
						c := newCrash(at)
						e := k.begin(t, cp, c, remove)
						c.awaitDeath(t)
						k.kept(e)
						if deleted && !remove {
							k.delete(e)
						}
						e.run("snapshot", quick...)
						if !deleted {
							k.ready(e)
							if n := len(e.plugin.Snapshots()); n != 1 {
								t.Errorf("%d snapshots", n)
							}
							k.delete(e)
						}
						k.none(e)
					})
				}
			})
		})
	}
}

// begin takes a snapshot, or deletes it, with a process that c kills.
func (k snapshotKind) begin(t *testing.T, cp *kubetest.ControlPlane, c *crash, remove bool) *env {
	e := newEnvOn(t, cp, k.config, 0)
	p := e.run("provision", quick...)
	claim := newClaim("c", e.class(false, nil))
	claim.Labels = map[string]string{"group": "s"}
	e.make(claim)
	e.bound("c")
	p.kill()
	k.class(e)
	if remove {
		p := e.run("snapshot", quick...)
		k.take(e)
		k.ready(e)
		p.kill()
	}
	for _, method := range []string{k.create, k.remove} {
		e.plugin.Always(method, c.step(method, csitest.Default()))
	}
	c.start(e, "snapshot", "--kubeconfig", kubetest.WriteKubeconfig(t, kubetest.Proxy(t, e.account(), c.hook)))
	if remove {
		k.delete(e)
	} else {
		k.take(e)
	}
	return e
}

// none waits until neither the driver nor the API server has a snapshot or a content.
func (k snapshotKind) none(e *env) {
	e.t.Helper()
	e.noSnapshots()
	e.eventually("there is no content", func(ctx context.Context) error {
		contents, err := k.contents(e, ctx)
		if err == nil && len(contents) > 0 {
			err = fmt.Errorf("contents %v", contents)
		}
		return err
	})
}

// kept fails the test if the driver has a snapshot and no content has a finalizer.
func (k snapshotKind) kept(e *env) {
	e.t.Helper()
	contents, err := k.contents(e, e.t.Context())
	if err != nil && !apierrors.IsNotFound(err) {
		e.t.Fatal(err)
	}
	kept := 0
	for _, finalizers := range contents {
		kept += min(1, len(finalizers))
	}
	if n := len(e.plugin.Snapshots()); n > kept {
		e.t.Errorf("%d snapshots at the driver, contents %v", n, contents)
	}
}
