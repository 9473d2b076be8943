// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/typed/volumesnapshot/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// crash kills a process after one of its effects: a write to the API, or a call of the driver that changes something.
// The process does not receive the response. What it leaves is what it would leave if it were killed just before its
// next effect.
type crash struct {
	at int // index of the effect; -1: none

	mu      sync.Mutex
	process *process
	effects []string
	dead    chan struct{}
}

func newCrash(at int) *crash { return &crash{at: at, dead: make(chan struct{})} }

// effect notes one and tells whether it is the one at which the process dies.
func (c *crash) effect(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.effects = append(c.effects, name)
	return len(c.effects)-1 == c.at
}

// start starts the process that is to die. It may do so before this returns.
func (c *crash) start(e *env, subcommand string, args ...string) {
	e.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.process = e.run(subcommand, append(slices.Clone(quick), args...)...)
}

// interrupted runs check once for every effect of a story.
func (c *crash) interrupted(t *testing.T, check func(t *testing.T, at int, effect string)) {
	t.Logf("effects: %q", c.effects)
	for at, effect := range c.effects {
		t.Run(fmt.Sprintf("%d %s", at, effect), func(t *testing.T) { check(t, at, effect) })
	}
}

func (c *crash) kill() {
	c.mu.Lock()
	p := c.process
	c.mu.Unlock()
	p.kill()
	close(c.dead)
}

// hook is for kubetest.Proxy. Events and Leases do not count.
func (c *crash) hook(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	path := strings.Split(r.URL.Path, "/")
	if r.Method == http.MethodGet || slices.Contains(path, "events") || slices.Contains(path, "leases") ||
		!c.effect(r.Method+" "+path[len(path)-1]) {
		pass.ServeHTTP(w, r)
		return
	}
	pass.ServeHTTP(httptest.NewRecorder(), r)
	c.kill()
}

// step wraps what the driver does in a call.
func (c *crash) step(method string, inner csitest.Step) csitest.Step {
	return func(ctx context.Context, p *csitest.Plugin, request any, do func() (any, error)) (any, error) {
		if !c.effect(method) {
			return inner(ctx, p, request, do)
		}
		_, _ = inner(ctx, p, request, do)
		c.kill()
		return nil, status.Error(codes.Canceled, "the client was killed")
	}
}

// story is something that can be interrupted anywhere.
type story struct {
	args   []string
	first  csitest.Step // what the driver does in the first CreateVolume; nil: what it should
	source bool         // there is a claim "source" before
	claim  func(*env) *corev1.PersistentVolumeClaim
	remove bool // the story is the end of the claim, not its begin
	// leaks reports that the volume of a claim leaks if the claim is deleted after this effect.
	leaks func(effect string, index int) bool
}

func plainClaim(e *env) *corev1.PersistentVolumeClaim { return newClaim("c", e.class(false, nil)) }

func cloneClaim(e *env) *corev1.PersistentVolumeClaim {
	c := plainClaim(e)
	c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: kube.KindClaim, Name: "source"}
	return c
}

func restoreClaim(e *env) *corev1.PersistentVolumeClaim {
	c := plainClaim(e)
	c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ptr.To("snapshot.storage.k8s.io"), Kind: kube.KindSnapshot,
		Name: "snap"}
	return c
}

const protectAlways = "--provisioning-protection=always"

// The volumes of the claims of these stories are neither lost nor doubled, whenever the
// process dies.
var stories = map[string]story{
	"provision, protected always": {args: []string{protectAlways}, claim: plainClaim},
	"provision, protected late": {claim: plainClaim,
		leaks: func(effect string, index int) bool { return index == 0 || effect == "POST persistentvolumes" }},
	"provision, indeterminate at first": {first: csitest.Fail(codes.Aborted, "pending"), claim: plainClaim,
		leaks: func(_ string, index int) bool { return index == 0 }},
	"provision, too small at first": {args: []string{protectAlways},
		first: csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.CapacityBytes = 1 }), claim: plainClaim},
	"clone":   {args: []string{protectAlways}, source: true, claim: cloneClaim},
	"restore": {args: []string{protectAlways}, source: true, claim: restoreClaim},
	"delete":  {claim: plainClaim, remove: true},
}

// begin makes what there is before a story, and starts the process that dies in it.
func (s story) begin(t *testing.T, c *crash) *env {
	e := newEnv(t, csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
	}}, 0)
	kubetest.InstallCRDs(t, e.cp)
	if s.source || s.remove {
		p := e.run("provision", quick...)
		if s.source {
			e.claim("source", e.class(false, nil))
			e.snapshot(e.bound("source"))
		}
		if s.remove {
			e.make(s.claim(e))
			e.bound("c")
		}
		p.kill()
	}
	first := s.first
	if first == nil {
		first = csitest.Default()
	}
	e.plugin.Next("CreateVolume", c.step("CreateVolume", first))
	e.plugin.Always("CreateVolume", c.step("CreateVolume", csitest.Default()))
	e.plugin.Always("DeleteVolume", c.step("DeleteVolume", csitest.Default()))
	kubeconfig := kubetest.WriteKubeconfig(t, kubetest.Proxy(t, e.account(), c.hook))
	c.start(e, "provision", slices.Concat(s.args, []string{"--kubeconfig", kubeconfig})...)
	if s.remove {
		e.deleteClaim("c")
	} else {
		e.make(s.claim(e))
	}
	return e
}

func (e *env) make(c *corev1.PersistentVolumeClaim) {
	e.t.Helper()
	if _, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).Create(e.t.Context(), c, metav1.CreateOptions{}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *env) snapshots() snapshotclient.SnapshotV1Interface {
	e.t.Helper()
	client, err := snapshotclient.NewForConfig(kube.ForCustomResources(e.cp.Config()))
	if err != nil {
		e.t.Fatal(err)
	}
	return client
}

// snapshot makes "snap", one of a volume, as the snapshot controller would.
func (e *env) snapshot(volume string) {
	e.t.Helper()
	ctx := e.t.Context()
	must := func(err error) {
		e.t.Helper()
		if err != nil {
			e.t.Fatal(err)
		}
	}
	pv, err := e.client.CoreV1().PersistentVolumes().Get(ctx, volume, metav1.GetOptions{})
	must(err)
	made, err := e.plugin.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "snap", SourceVolumeId: pv.Spec.CSI.VolumeHandle})
	must(err)
	s, err := e.snapshots().VolumeSnapshots(e.ns).Create(ctx, &snapshotv1.VolumeSnapshot{
		ObjectMeta: metav1.ObjectMeta{Name: "snap"},
		Spec:       snapshotv1.VolumeSnapshotSpec{Source: snapshotv1.VolumeSnapshotSource{PersistentVolumeClaimName: ptr.To("source")}},
	}, metav1.CreateOptions{})
	must(err)
	content, err := e.snapshots().VolumeSnapshotContents().Create(ctx, &snapshotv1.VolumeSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{Name: e.ns + "-snap"},
		Spec: snapshotv1.VolumeSnapshotContentSpec{
			Driver: e.plugin.Name(), DeletionPolicy: snapshotv1.VolumeSnapshotContentDelete,
			Source:            snapshotv1.VolumeSnapshotContentSource{VolumeHandle: &pv.Spec.CSI.VolumeHandle},
			VolumeSnapshotRef: corev1.ObjectReference{Kind: kube.KindSnapshot, Namespace: e.ns, Name: "snap", UID: s.UID},
		},
	}, metav1.CreateOptions{})
	must(err)
	patch := fmt.Appendf(nil, `{"status":{"snapshotHandle":%q,"readyToUse":true}}`, made.Snapshot.SnapshotId)
	_, err = e.snapshots().VolumeSnapshotContents().Patch(ctx, content.Name, types.MergePatchType, patch, metav1.PatchOptions{},
		"status") // a snapshotter may write it, too
	must(err)
	s.Status = &snapshotv1.VolumeSnapshotStatus{BoundVolumeSnapshotContentName: &content.Name, ReadyToUse: ptr.To(true)}
	_, err = e.snapshots().VolumeSnapshots(e.ns).UpdateStatus(ctx, s, metav1.UpdateOptions{})
	must(err)
}

// settled waits for the end of a story: nothing is lost, doubled or stuck.
func (s story) settled(e *env, deleted bool) {
	e.t.Helper()
	volumes := 0
	if s.source {
		volumes++
	}
	if !deleted {
		e.bound("c")
		volumes++
	}
	e.agrees(volumes)
	e.eventually("nothing is kept by a finalizer of ours", func(ctx context.Context) error {
		claims, err := e.client.CoreV1().PersistentVolumeClaims(e.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, c := range claims.Items {
			if deleted && c.Name == "c" || fmt.Sprint(c.Finalizers) != "[kubernetes.io/pvc-protection]" {
				return fmt.Errorf("claim %s has finalizers %v", c.Name, c.Finalizers)
			}
		}
		list, err := e.snapshots().VolumeSnapshots(e.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, snap := range list.Items {
			if len(snap.Finalizers) > 0 {
				return fmt.Errorf("snapshot %s has finalizers %v", snap.Name, snap.Finalizers)
			}
		}
		return nil
	})
	for _, v := range e.plugin.Volumes() {
		if n := len(slices.DeleteFunc(e.plugin.Volumes(), func(o csitest.Volume) bool { return o.Name != v.Name })); n != 1 {
			e.t.Errorf("%d volumes of the name %s", n, v.Name)
		}
	}
}

// awaitDeath returns when the process has died.
func (c *crash) awaitDeath(t *testing.T) {
	t.Helper()
	select {
	case <-c.dead:
	case <-time.After(time.Minute):
		t.Fatal("the process did not come so far")
	}
}

func TestProvisionerKilledAnywhere(t *testing.T) {
	t.Parallel()
	for name, s := range stories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCrash(-1)
			e := s.begin(t, c)
			s.settled(e, s.remove)
			c.process.kill()
			c.interrupted(t, func(t *testing.T, at int, effect string) {
				for _, deleted := range []bool{false, true} {
					// docs/provisioner.md says what leaks
					if s.remove && !deleted || deleted && s.leaks != nil && s.leaks(effect, at) {
						continue
					}
					t.Run(fmt.Sprintf("deleted=%t", deleted), func(t *testing.T) {
						t.Parallel()
						c := newCrash(at)
						e := s.begin(t, c)
						c.awaitDeath(t)
						if deleted && !s.remove {
							e.deleteClaim("c")
						}
						e.run("provision", append(slices.Clone(quick), s.args...)...)
						s.settled(e, deleted)
					})
				}
			})
		})
	}
}

// TestAttacherKilledAnywhere has no volume published without an attachment that says so
// and has our finalizer, and no attachment stuck, whenever the process dies.
func TestAttacherKilledAnywhere(t *testing.T) {
	t.Parallel()
	for name, detach := range map[string]bool{"attach": false, "detach": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begin := func(t *testing.T, c *crash) *env {
				e := newEnv(t, csitest.Config{}, 1)
				e.run("provision", quick...)
				e.make(plainClaim(e))
				volume := e.bound("c")
				if detach {
					p := e.run("attach", quick...)
					e.attach("a", volume, e.nodes[0])
					e.attached(1)
					p.kill()
				}
				for _, method := range []string{"ControllerPublishVolume", "ControllerUnpublishVolume"} {
					e.plugin.Always(method, c.step(method, csitest.Default()))
				}
				c.start(e, "attach", "--kubeconfig", kubetest.WriteKubeconfig(t, kubetest.Proxy(t, e.account(), c.hook)))
				if detach {
					e.detach("a")
				} else {
					e.attach("a", volume, e.nodes[0])
				}
				return e
			}
			end := func(e *env, attachments int) {
				e.attached(attachments)
				e.agrees(1)
				if attachments > 0 {
					e.detach("a")
					e.attached(0)
				}
				e.leftovers("c") // the volume is not kept by a finalizer either
			}
			c := newCrash(-1)
			e := begin(t, c)
			if detach {
				e.attached(0)
			} else {
				e.attached(1)
			}
			c.process.kill()
			c.interrupted(t, func(t *testing.T, at int, _ string) {
				for _, deleted := range []bool{false, true} {
					if detach && deleted {
						continue
					}
					t.Run(fmt.Sprintf("deleted=%t", deleted), func(t *testing.T) {
						t.Parallel()
						c := newCrash(at)
						e := begin(t, c)
						c.awaitDeath(t)
						e.protected()
						if deleted {
							e.detach("a")
						}
						e.run("attach", quick...)
						if detach || deleted {
							end(e, 0)
						} else {
							end(e, 1)
						}
					})
				}
			})
		})
	}
}

// protected fails the test when a volume is published without an attachment that has
// our finalizer.
func (e *env) protected() {
	e.t.Helper()
	vas, err := e.attachments(e.t.Context())
	if err != nil {
		e.t.Fatal(err)
	}
	for _, va := range vas {
		if e.plugin.Publications() > 0 && !strings.Contains(fmt.Sprint(va.Finalizers), "external-attacher/") {
			e.t.Errorf("published, and the attachment has finalizers %v", va.Finalizers)
		}
	}
	if n := e.plugin.Publications(); n > len(vas) {
		e.t.Errorf("%d publications, %d attachments", n, len(vas))
	}
}
