// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// cleanup is the story of a claim whose node is deleted, with only the nodecontroller and
// Kubernetes at work.
type cleanup struct {
	*local
	crash    *crash
	kind     cleanupKind
	volume   string
	mark     int64
	approved bool
}

type cleanupKind struct {
	args    []string
	drained bool // the node has the finalizer before it is deleted
	removed bool // the volume goes too
}

var cleanupKinds = map[string]cleanupKind{
	"claims":    {args: []string{"--node-cleanup=claims"}},
	"volumes":   {args: []string{"--node-cleanup=volumes", "--pv-release-grace=0s"}, removed: true},
	"finalizer": {args: []string{"--node-cleanup=claims", "--node-finalizer-mode=manage", "--node-delete-grace=0s"}, drained: true},
}

// begin makes a claim with a volume on the first of two nodes, and starts the process that dies.
func (k cleanupKind) begin(t *testing.T, c *crash) *cleanup {
	t.Helper()
	s := &cleanup{local: newCluster(t, 2, false), crash: c, kind: k}
	s.bind()
	s.mark = s.local.mark()
	c.start(s.env, "nodecontroller", slices.Concat(election, k.args,
		[]string{"--kubeconfig", kubetest.WriteKubeconfig(t, kubetest.Proxy(t, s.account(), c.hook))})...)
	return s
}

// bind makes the claim "c" and its volume, as provisioner and attacher leave it.
func (s *cleanup) bind() {
	s.t.Helper()
	claim := newClaim("c", s.class)
	s.volume = s.ns + "-volume"
	claim.Spec.VolumeName = s.volume
	claim, err := s.client.CoreV1().PersistentVolumeClaims(s.ns).Create(s.t.Context(), claim, metav1.CreateOptions{})
	s.must(err)
	_, err = s.client.CoreV1().PersistentVolumes().Create(s.t.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name: s.volume, Annotations: map[string]string{storagehelpers.AnnDynamicallyProvisioned: s.plugin.Name()},
			Finalizers: []string{"external-provisioner.volume.kubernetes.io/finalizer", "external-attacher/" +
				strings.ReplaceAll(s.plugin.Name(), ".", "-")},
		},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes: claim.Spec.AccessModes, Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete, StorageClassName: s.class,
			ClaimRef: &corev1.ObjectReference{Namespace: s.ns, Name: claim.Name, UID: claim.UID},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: s.plugin.Name(),
				VolumeHandle: s.plugin.AddVolume("v", 1<<30)}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: s.key(), Operator: corev1.NodeSelectorOpIn, Values: s.nodes[:1]}},
			}}}},
		},
	}, metav1.CreateOptions{})
	s.must(err)
	s.bound("c")
	s.eventually("the volume is bound", func(ctx context.Context) error {
		pv, err := s.pv(ctx, s.volume)
		if err == nil && (pv.Status.Phase != corev1.VolumeBound || !slices.Contains(pv.Finalizers, "kubernetes.io/pv-protection")) {
			err = fmt.Errorf("it is %s with %v", pv.Status.Phase, pv.Finalizers)
		}
		return err
	})
}

// play performs the next step of the environment, and returns what the end still lacks.
func (s *cleanup) play(ctx context.Context) error {
	gone, err := s.playNode(ctx)
	if err != nil || !gone {
		return errors.Join(err, errors.New("the node is there"))
	}
	claim, err := s.pvc(ctx, "c")
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	there := err == nil
	pv, err := s.pv(ctx, s.volume)
	switch {
	case err != nil && !apierrors.IsNotFound(err):
		return err
	case err != nil && there:
		s.t.Error("the volume went before its claim")
		return nil
	case err != nil && !s.kind.removed:
		s.t.Error("the volume was deleted")
		return nil
	case err != nil:
		return nil
	}
	if err := s.pass(ctx, pv, claim, there); err != nil {
		return err
	}
	if there || s.kind.removed || pv.Status.Phase != corev1.VolumeReleased {
		return fmt.Errorf("claim there: %t; volume %s, %v, %v", there, pv.Status.Phase, pv.Annotations, pv.Finalizers)
	}
	return nil
}

// playNode has the node go, once it has the finalizer where it is to have that.
func (s *cleanup) playNode(ctx context.Context) (gone bool, err error) {
	nodes := s.client.CoreV1().Nodes()
	first, err := nodes.Get(ctx, s.nodes[0], metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		err = s.client.StorageV1().CSINodes().Delete(ctx, s.nodes[0], metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) {
			err = nil
		}
		return true, err
	}
	if err != nil || first.DeletionTimestamp != nil {
		return false, err
	}
	other, err := nodes.Get(ctx, s.nodes[1], metav1.GetOptions{})
	if err != nil {
		return false, err
	}
	if s.kind.drained && (len(first.Finalizers) == 0 || len(other.Finalizers) == 0) {
		return false, errors.New("nodes lack the finalizer")
	}
	return false, nodes.Delete(ctx, s.nodes[0], metav1.DeleteOptions{})
}

// pass approves the cleanup, before which nothing may be deleted: the grace
// would have every run take a minute.
func (s *cleanup) pass(ctx context.Context, pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim, there bool) error {
	all, err := s.records(ctx)
	if lost := all[s.nodes[0]]; err != nil || s.approved || lost.Since.IsZero() {
		return err
	}
	if !s.kind.drained && (!there || claim.DeletionTimestamp != nil || pv.DeletionTimestamp != nil) {
		s.t.Error("something was deleted within the grace")
	}
	err = s.approve(ctx, s.nodes[0])
	s.approved = err == nil
	return err
}

// changed is what the nodecontroller did, by names that are the same in every run.
func (s *cleanup) changed() []string {
	s.t.Helper()
	done := s.done(s.mark, map[string]string{"c": "c", s.volume: "volume", s.nodes[0]: "lost", s.nodes[1]: "other"})
	if s.kind.drained { // which of the nodes comes first is left to chance
		slices.Sort(done[:2])
	}
	return done
}

// TestNodecontrollerKilledAnywhere ends as without a kill: everything that was to
// be done was done once, in the same order, and nothing before its time.
func TestNodecontrollerKilledAnywhere(t *testing.T) {
	t.Parallel()
	for name, kind := range cleanupKinds {
		t.Run(name, func(t *testing.T) {
			c := newCrash(-1)
			s := kind.begin(t, c)
			s.eventually("the clean-up has ended", s.play)
			c.process.kill()
			want := s.changed()
			t.Logf("done: %q", want)
			c.interrupted(t, func(t *testing.T, at int, _ string) {
				c := newCrash(at)
				s := kind.begin(t, c)
				s.eventually("the process has died", func(ctx context.Context) error {
					select {
					case <-c.dead:
						return nil
					default:
					}
					return errors.Join(s.play(ctx), errors.New("it lives"))
				})
				s.expireLease("nodecontroller-leader-" + s.provisionerLease())
				p := s.run("nodecontroller", slices.Concat(quick, election, kind.args)...)
				s.eventually("the clean-up has ended", s.play)
				p.says("Starting controller")
				if !kind.removed {
					s.judged(p, s.nodes[0], s.volume)
				}
				s.expect(s.changed(), want)
			})
		})
	}
}
