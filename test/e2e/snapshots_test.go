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
	cp, err := kubetest.Start(t.Context(), kubetest.Config{ControllerManager: true, Audit: true, SnapshotController: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cp.Stop)
	for name, test := range map[string]func(*testing.T, *kubetest.ControlPlane){
		"counts": testSnapshotCounts, "restore": testSnapshotRestored, "order": testSnapshotDeletedInEveryOrder,
		"killed": testSnapshotterKilled,
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

// testSnapshotterKilled has no snapshot at the driver without a content, no content that never ends, and no second
// snapshot for one content, whenever the process dies.
func testSnapshotterKilled(t *testing.T, cp *kubetest.ControlPlane) {
	for name, remove := range map[string]bool{"create": false, "delete": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begin := func(t *testing.T, c *crash) *env {
				e := newEnvOn(t, cp, snapshotting(), 0)
				p := e.run("provision", quick...)
				e.claim("c", e.class(false, nil))
				e.bound("c")
				p.kill()
				e.snapshotClass()
				if remove {
					p := e.run("snapshot", quick...)
					e.takeSnapshot("s", "c")
					e.volumeSnapshotReady("s")
					p.kill()
				}
				for _, method := range []string{"CreateSnapshot", "DeleteSnapshot"} {
					e.plugin.Always(method, c.step(method, csitest.Default()))
				}
				c.start(e, "snapshot", "--kubeconfig", kubetest.WriteKubeconfig(t, kubetest.Proxy(t, e.account(), c.hook)))
				if remove {
					e.deleteSnapshot("s")
				} else {
					e.takeSnapshot("s", "c")
				}
				return e
			}
			c := newCrash(-1, false)
			e := begin(t, c)
			if remove {
				e.noSnapshots()
			} else {
				e.volumeSnapshotReady("s")
			}
			c.process.kill()
			c.interrupted(t, func(t *testing.T, interrupted *crash, _ string) {
				for _, deleted := range []bool{false, true} {
					if remove && !deleted {
						continue
					}
					t.Run(fmt.Sprintf("deleted=%t", deleted), func(t *testing.T) {
						t.Parallel()
						c := newCrash(interrupted.at, interrupted.after)
						e := begin(t, c)
						c.awaitDeath(t)
						e.snapshotsKept()
						if deleted && !remove {
							e.deleteSnapshot("s")
						}
						e.run("snapshot", quick...)
						if !deleted {
							e.volumeSnapshotReady("s")
							if n := len(e.plugin.Snapshots()); n != 1 {
								t.Errorf("%d snapshots", n)
							}
							e.deleteSnapshot("s")
						}
						e.noSnapshots()
					})
				}
			})
		})
	}
}

// snapshotsKept fails the test if the driver has a snapshot and no content has a finalizer.
func (e *env) snapshotsKept() {
	e.t.Helper()
	contents, err := e.contents(e.t.Context())
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
