// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/typed/volumesnapshot/v1"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// copying is a driver that restores and clones, and a class.
func copying(t *testing.T, change func(*Config)) *fixture {
	t.Helper()
	f := scenario(t, csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
	}}, change)
	f.makeClass(nil)
	return f
}

// patient leaves it to events to wake what has failed.
func patient(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Hour, time.Hour }

// snapshot makes a snapshot of 1Gi at the driver, and plays the snapshot controller.
func (f *fixture) snapshot(namespace, name string,
	change func(*snapshotv1.VolumeSnapshot, *snapshotv1.VolumeSnapshotContent)) *snapshotv1.VolumeSnapshot {
	f.Helper()
	made, err := f.Plugin.CreateSnapshot(
		f.Context(), &csi.CreateSnapshotRequest{Name: namespace + name, SourceVolumeId: f.Plugin.AddVolume("of-"+namespace+name, 1<<30)},
	)
	f.Must(err)
	handle, contentName := made.Snapshot.SnapshotId, namespace+"-"+name
	wanted := &snapshotv1.VolumeSnapshot{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       snapshotv1.VolumeSnapshotSpec{Source: snapshotv1.VolumeSnapshotSource{VolumeSnapshotContentName: &contentName}},
		Status: &snapshotv1.VolumeSnapshotStatus{
			BoundVolumeSnapshotContentName: &contentName, ReadyToUse: ptr.To(true), RestoreSize: ptr.To(resource.MustParse("1Gi")),
		},
	}
	content := &snapshotv1.VolumeSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{Name: contentName},
		Spec: snapshotv1.VolumeSnapshotContentSpec{
			Driver: f.Driver, DeletionPolicy: snapshotv1.VolumeSnapshotContentRetain,
			Source:            snapshotv1.VolumeSnapshotContentSource{SnapshotHandle: &handle},
			VolumeSnapshotRef: corev1.ObjectReference{Namespace: namespace, Name: name},
		},
		Status: &snapshotv1.VolumeSnapshotContentStatus{SnapshotHandle: &handle},
	}
	if change != nil {
		change(wanted, content)
	}
	finalizers := wanted.Finalizers
	wanted.Finalizers = nil
	s, err := f.snapshots.VolumeSnapshots(namespace).Create(f.Context(), wanted, metav1.CreateOptions{})
	f.Must(err)
	if content.Spec.VolumeSnapshotRef.UID == "" {
		content.Spec.VolumeSnapshotRef.UID = s.UID
	}
	c, err := f.snapshots.VolumeSnapshotContents().Create(f.Context(), content, metav1.CreateOptions{})
	f.Must(err)
	c.Status = content.Status
	_, err = f.snapshots.VolumeSnapshotContents().UpdateStatus(f.Context(), c, metav1.UpdateOptions{})
	f.Must(err)
	f.snapshotStatus(s, wanted.Status)
	_, err = kube.PatchMetadata(
		f.Context(), f.snapshots.VolumeSnapshots(namespace), s, kube.MetadataPatch{AddFinalizers: finalizers},
	) // now that it is bound
	f.Must(err)
	return s
}

func (f *fixture) snapshotStatus(s *snapshotv1.VolumeSnapshot, status *snapshotv1.VolumeSnapshotStatus) {
	f.Helper()
	data, err := json.Marshal(map[string]any{"status": status})
	f.Must(err)
	_, err = f.snapshots.VolumeSnapshots(s.Namespace).Patch(
		f.Context(), s.Name, types.MergePatchType, data, metav1.PatchOptions{}, "status",
	)
	f.Must(err)
}

// source makes a claim that is bound to a volume of the driver.
func (f *fixture) source(namespace, name string, change func(*corev1.PersistentVolumeClaim,
	*corev1.PersistentVolume)) *corev1.PersistentVolumeClaim {
	f.Helper()
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	pvName := namespace + "-" + name
	wanted := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: ptr.To("another"), VolumeName: pvName, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: size},
		},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
	}
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: pvName},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: size, AccessModes: wanted.Spec.AccessModes, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			ClaimRef: &corev1.ObjectReference{Namespace: namespace, Name: name},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: f.Driver, VolumeHandle: f.Plugin.AddVolume(pvName, 1<<30)},
			},
		},
		Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound},
	}
	if change != nil {
		change(wanted, pv)
	}
	claims, finalizers := f.Client.CoreV1().PersistentVolumeClaims(namespace), wanted.Finalizers
	wanted.Finalizers = nil
	claim, err := claims.Create(f.Context(), wanted, metav1.CreateOptions{})
	f.Must(err)
	if pv.Spec.ClaimRef.UID == "" {
		pv.Spec.ClaimRef.UID = claim.UID
	}
	_, err = f.Client.CoreV1().PersistentVolumes().Create(f.Context(), pv, metav1.CreateOptions{})
	f.Must(err)
	f.phase(pv, pv.Status.Phase)
	f.claimPhase(claim, wanted.Status.Phase)
	_, err = kube.PatchMetadata(f.Context(), claims, claim, kube.MetadataPatch{AddFinalizers: finalizers}) // now that it is bound
	f.Must(err)
	return claim
}

func (f *fixture) claimPhase(claim *corev1.PersistentVolumeClaim, phase corev1.PersistentVolumeClaimPhase) {
	f.Helper()
	_, err := f.Client.CoreV1().PersistentVolumeClaims(claim.Namespace).Patch(f.Context(), claim.Name, types.MergePatchType,
		fmt.Appendf(nil, `{"status":{"phase":%q}}`, phase), metav1.PatchOptions{}, "status")
	f.Must(err)
}

// restoring is a claim of a name for a snapshot.
func restoring(name, snapshot string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Name = name
		from(ptr.To(volumerules.SnapshotGroup), kube.KindSnapshot, snapshot)(c)
	}
}

// cloning is a claim of a name for another claim.
func cloning(name, source string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Name = name
		from(nil, kube.KindClaim, source)(c)
	}
}

// live returns a source from the API server; nil if it is deleted.
func (f *fixture) live(ctx context.Context, source metav1.Object) (metav1.Object, error) {
	var now metav1.Object
	var err error
	if _, ok := source.(*snapshotv1.VolumeSnapshot); ok {
		now, err = f.snapshots.VolumeSnapshots(source.GetNamespace()).Get(ctx, source.GetName(), metav1.GetOptions{})
	} else {
		now, err = f.Client.CoreV1().PersistentVolumeClaims(source.GetNamespace()).Get(ctx, source.GetName(), metav1.GetOptions{})
	}
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return now, err
}

func isKept(source metav1.Object) bool {
	return source != nil && (slices.Contains(source.GetFinalizers(), kube.CloningProtection) ||
		slices.Contains(source.GetFinalizers(), kube.SnapshotProtection))
}

// kept tells whether a source has the finalizer now.
func (f *fixture) kept(source metav1.Object, want bool) {
	f.Helper()
	now, err := f.live(f.Context(), source)
	f.Must(err)
	if isKept(now) != want {
		f.Errorf("source %s: kept %t, want %t", source.GetName(), !want, want)
	}
}

func (f *fixture) becomesFree(source metav1.Object) {
	f.Helper()
	kubetest.Eventually(f.T, "no finalizer keeps "+source.GetName(), func(ctx context.Context) error {
		now, err := f.live(ctx, source)
		if err == nil && isKept(now) {
			err = fmt.Errorf("finalizers %v", now.GetFinalizers())
		}
		return err
	})
}

// looksAgain waits until sources were looked at n times since the begin of change.
func (f *fixture) looksAgain(queue string, n uint64, change func()) {
	f.Helper()
	looks := func() (looks uint64) {
		families, err := f.c.deps.Registry.(prometheus.Gatherer).Gather()
		f.Must(err)
		for _, family := range families {
			for _, m := range family.Metric {
				if family.GetName() == "workqueue_work_duration_seconds" && m.Label[0].GetValue() == queue {
					looks = m.Histogram.GetSampleCount()
				}
			}
		}
		return looks
	}
	before := looks()
	change()
	kubetest.Eventually(f.T, "sources were looked at", func(context.Context) error {
		if now := looks(); now < before+n {
			return fmt.Errorf("%d times so far", now-before)
		}
		return nil
	})
}

// expand requests 10Gi of a claim of the class.
func (f *fixture) expand(claim *corev1.PersistentVolumeClaim) {
	f.Helper()
	patch := func(change func(context.Context, []byte) error, text string) {
		f.Helper()
		kubetest.Eventually(f.T, text, func(ctx context.Context) error { return change(ctx, []byte(text)) })
	}
	patch(func(ctx context.Context, data []byte) error {
		_, err := f.Client.StorageV1().StorageClasses().Patch(ctx, f.class, types.MergePatchType, data, metav1.PatchOptions{})
		return err
	}, `{"allowVolumeExpansion":true}`)
	patch(func(ctx context.Context, data []byte) error { // the admission of the API server may not have received the class yet
		_, err := f.Client.CoreV1().PersistentVolumeClaims(claim.Namespace).Patch(ctx, claim.Name, types.MergePatchType, data,
			metav1.PatchOptions{})
		return err
	}, `{"spec":{"resources":{"requests":{"storage":"10Gi"}}}}`)
}

// grant lets the claims of a namespace use objects in another, by a JSON list of
// entries of each kind.
func (f *fixture) grant(namespace, name, from, to string) {
	f.Helper()
	body := fmt.Appendf(
		nil,
		`{"apiVersion":"gateway.networking.k8s.io/v1beta1","kind":"ReferenceGrant","metadata":{"name":%q},"spec":{"from":[%s],"to":[%s]}}`,
		name, from, to,
	)
	f.Must(f.Client.Discovery().RESTClient().Post().AbsPath(
		"/apis/gateway.networking.k8s.io/v1beta1/namespaces", namespace, "referencegrants",
	).
		SetHeader("Content-Type", "application/json").Body(body).Do(f.Context()).Error())
}

func (f *fixture) remove(claim *corev1.PersistentVolumeClaim) {
	f.Helper()
	claims := f.Client.CoreV1().PersistentVolumeClaims(claim.Namespace)
	f.Must(claims.Delete(f.Context(), claim.Name, metav1.DeleteOptions{}))
}

// removeAtOnce does not leave it to the controllers of Kubernetes to remove their protection.
func (f *fixture) removeAtOnce(claim *corev1.PersistentVolumeClaim) {
	f.Helper()
	f.remove(claim)
	_, err := f.Client.CoreV1().PersistentVolumeClaims(claim.Namespace).Patch(f.Context(), claim.Name, types.JSONPatchType,
		[]byte(`[{"op":"test","path":"/metadata/finalizers/0","value":"kubernetes.io/pvc-protection"},`+
			`{"op":"remove","path":"/metadata/finalizers/0"}]`), metav1.PatchOptions{})
	f.Must(err)
}

func sourceAsked(call csitest.Call) *csi.VolumeContentSource {
	return call.Request.(*csi.CreateVolumeRequest).VolumeContentSource
}

func provisionerScenarioSource(t *testing.T) {
	kubetest.InstallCRDs(t, kubetest.Get(t))

	t.Run("053_restore", func(t *testing.T) {
		f := copying(t, nil)
		var handle string
		s := f.snapshot(f.Namespace, "s", func(_ *snapshotv1.VolumeSnapshot, c *snapshotv1.VolumeSnapshotContent) {
			handle = *c.Status.SnapshotHandle
		})
		f.Plugin.Next(create, csitest.Hang())
		claim := f.claim(restoring("data", "s"))
		f.Wait(create, 1)
		f.kept(s, true)
		if id := sourceAsked(f.Plugin.Calls(create)[0]).GetSnapshot().GetSnapshotId(); id != handle {
			t.Errorf("snapshot %q, want %q", id, handle)
		}
		f.Plugin.Release()
		f.saved(claim)
		f.becomesFree(s)
	})

	t.Run("054_055_056_058_062_refused", func(t *testing.T) {
		f := copying(t, func(c *Config) { c.SnapshotOrphanSweepInterval = 0 })
		type (
			snapshot = snapshotv1.VolumeSnapshot
			content  = snapshotv1.VolumeSnapshotContent
		)
		ofFiles := func(annotations map[string]string) func(*snapshot, *content) {
			return func(_ *snapshot, c *content) {
				c.Spec.SourceVolumeMode, c.Annotations = ptr.To(corev1.PersistentVolumeFilesystem), annotations
			}
		}
		tests := []struct {
			name   string // of snapshot and claim
			change func(*snapshot, *content)
			claim  func(*corev1.PersistentVolumeClaim)
			delete bool
			event  []string
		}{
			{name: "small", claim: size("500Mi"), event: []string{"500Mi", "1Gi"}},
			{name: "unready", change: func(s *snapshot, _ *content) { s.Status.ReadyToUse = nil }, event: []string{"not ready"}},
			{
				name: "unbound", change: func(s *snapshot, _ *content) { s.Status.BoundVolumeSnapshotContentName = nil },
				event: []string{"not bound"},
			},
			{
				name: "other-uid", change: func(_ *snapshot, c *content) { c.Spec.VolumeSnapshotRef.UID = "x" },
				event: []string{"another snapshot"},
			},
			{name: "other-driver", change: func(_ *snapshot, c *content) { c.Spec.Driver = "x" }, event: []string{`driver "x"`}},
			{
				name: "no-handle", change: func(_ *snapshot, c *content) { c.Status.SnapshotHandle = nil },
				event: []string{"no snapshot handle"},
			},
			{
				name: "deleted", change: func(s *snapshot, _ *content) { s.Finalizers = []string{"example.com/keep"} }, delete: true,
				event: []string{"being deleted"},
			},
			{name: "mode", change: ofFiles(nil), claim: block, event: []string{"lacks annotation"}},
			{
				name: "mode-maybe", change: ofFiles(map[string]string{volumerules.AnnAllowModeChange: "maybe"}), claim: block,
				event: []string{`"maybe"`},
			},
			{
				name: "mode-false", change: ofFiles(map[string]string{volumerules.AnnAllowModeChange: "false"}), claim: block,
				event: []string{"forbids"},
			},
			{name: "group", claim: func(c *corev1.PersistentVolumeClaim) {
				c.Spec.DataSource = nil
				fromRef(ptr.To("x"), nil, kube.KindSnapshot, "group")(c)
			}, event: []string{`API group is "x"`}},
		}
		var sources []*snapshot
		for _, tt := range tests {
			s := f.snapshot(f.Namespace, tt.name, tt.change)
			sources = append(sources, s)
			if tt.delete {
				f.Must(f.snapshots.VolumeSnapshots(f.Namespace).Delete(t.Context(), tt.name, metav1.DeleteOptions{}))
			}
			f.claim(func(c *corev1.PersistentVolumeClaim) {
				restoring(tt.name, tt.name)(c)
				if tt.claim != nil {
					tt.claim(c)
				}
			})
		}
		f.claim(restoring("absent", "absent"))
		for _, tt := range tests { // every claim is tried again and again
			f.event(append(tt.event, "ProvisioningFailed", "VolumeSnapshot "+f.Namespace+"/"+tt.name+":")...)
		}
		f.event("ProvisioningFailed", "VolumeSnapshot "+f.Namespace+"/absent:", "not found")
		f.Calls(create, 0)
		for _, s := range sources {
			f.kept(s, false)
		}
	})

	t.Run("054_056_058_restored_all_the_same", func(t *testing.T) {
		f := copying(t, func(c *Config) { c.SnapshotOrphanSweepInterval = 0 })
		f.snapshot(f.Namespace, "large", nil)
		f.snapshot(f.Namespace, "mode", func(_ *snapshotv1.VolumeSnapshot, c *snapshotv1.VolumeSnapshotContent) {
			c.Spec.SourceVolumeMode, c.Annotations = ptr.To(corev1.PersistentVolumeFilesystem),
				map[string]string{volumerules.AnnAllowModeChange: "true"}
		})
		deleted := f.snapshot(f.Namespace, "deleted", func(s *snapshotv1.VolumeSnapshot, _ *snapshotv1.VolumeSnapshotContent) {
			s.Finalizers = []string{kube.SnapshotProtection}
		})
		f.Must(f.snapshots.VolumeSnapshots(f.Namespace).Delete(t.Context(), "deleted", metav1.DeleteOptions{}))
		for name, change := range map[string]func(*corev1.PersistentVolumeClaim){"large": size("2Gi"), "mode": block,
			"deleted": size("1Gi")} {
			f.saved(f.claim(func(c *corev1.PersistentVolumeClaim) { restoring(name, name)(c); change(c) }))
		}
		f.Calls(create, 3)
		kubetest.Eventually(t, "the snapshot is deleted", func(ctx context.Context) error {
			if now, err := f.live(ctx, deleted); err != nil || now != nil {
				return fmt.Errorf("finalizers %v, error %w", now, err)
			}
			return nil
		})
	})

	t.Run("058_modes_are_not_compared", func(t *testing.T) {
		f := copying(t, func(c *Config) { c.PreventVolumeModeConversion = false })
		f.snapshot(f.Namespace, "s", func(_ *snapshotv1.VolumeSnapshot, c *snapshotv1.VolumeSnapshotContent) {
			c.Spec.SourceVolumeMode = ptr.To(corev1.PersistentVolumeFilesystem)
		})
		f.saved(f.claim(func(c *corev1.PersistentVolumeClaim) { restoring("data", "s")(c); block(c) }))
	})

	t.Run("055_068_becomes_ready", func(t *testing.T) {
		f := copying(t, patient)
		s := f.snapshot(f.Namespace, "s", func(s *snapshotv1.VolumeSnapshot, _ *snapshotv1.VolumeSnapshotContent) {
			s.Status.ReadyToUse = ptr.To(false)
		})
		source := f.source(f.Namespace, "c", func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			c.Status.Phase = corev1.ClaimPending
		})
		restored := f.claim(restoring("restored", "s"))
		f.event("ProvisioningFailed", "not ready")
		clone := f.claim(cloning("clone", "c"))
		f.event("ProvisioningFailed", "not Bound")
		f.snapshotStatus(s, &snapshotv1.VolumeSnapshotStatus{ReadyToUse: ptr.To(true)})
		f.saved(restored)
		f.claimPhase(source, corev1.ClaimBound)
		f.saved(clone)
	})

	t.Run("057_061_067_not_supported", func(t *testing.T) {
		f := scenario(t, csitest.Config{}, nil)
		f.makeClass(nil)
		for _, tt := range []struct {
			claim func(*corev1.PersistentVolumeClaim)
			event []string
		}{
			{
				restoring("restore", "s"),
				[]string{"Warning", "ProvisioningFailed", "does not support restoring snapshots", "VolumeSnapshot " + f.Namespace + "/s"},
			},
			{cloning("clone", "c"), []string{"Warning", "ProvisioningFailed", "does not support cloning volumes"}},
			{func(c *corev1.PersistentVolumeClaim) {
				c.Name = "elsewhere"
				fromRef(nil, ptr.To("b"), kube.KindClaim, "c")(c)
			}, []string{"Warning", "ProvisioningFailed", "CrossNamespaceVolumeDataSource"}},
		} {
			claim := f.claim(tt.claim)
			f.event(tt.event...)
			f.remove(claim)
		}
		f.Calls(create, 0)
	})

	t.Run("061_populator", func(t *testing.T) {
		f := copying(t, func(c *Config) { c.RetryIntervalStart, c.RetryIntervalMax = time.Millisecond, time.Millisecond })
		f.claim(func(c *corev1.PersistentVolumeClaim) {
			c.Name = "populated"
			fromRef(ptr.To("example.com"), nil, "Hello", "h")(c)
		})
		f.event("Normal Provisioning", "populator", "Hello")
		f.saved(f.claim(nil)) // a retry would have come meanwhile
		if e := <-f.events.Events; !strings.Contains(e, "ProvisioningSucceeded") {
			t.Error(e)
		}
		f.Calls(create, 1)
	})

	t.Run("059_source_ignored_by_the_driver", func(t *testing.T) {
		f := scenario(t, csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
			csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		}}, nil)
		f.makeClass(parameters(map[string]string{
			volumerules.ParameterPrefix + "provisioner-secret-name": "secret", volumerules.ParameterPrefix +
				"provisioner-secret-namespace": f.Namespace,
		}))
		_, err := f.Client.CoreV1().Secrets(f.Namespace).Create(
			t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "secret"}, StringData: map[string]string{"k": "v"}},
			metav1.CreateOptions{},
		)
		f.Must(err)
		f.Plugin.Next(create, csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.ContentSource = nil }))
		s := f.snapshot(f.Namespace, "s", nil)
		claim := f.claim(restoring("data", "s"))
		f.event("ProvisioningFailed", "driver bug")
		pv := f.saved(claim)
		f.Calls(create, 2)
		f.Calls(remove, 1)
		made := f.Plugin.Calls(create)[0].Response.(*csi.CreateVolumeResponse).Volume.VolumeId
		if r := f.Plugin.Calls(remove)[0].Request.(*csi.DeleteVolumeRequest); r.VolumeId != made || r.Secrets["k"] != "v" ||
			made == pv.Spec.CSI.VolumeHandle {
			t.Errorf("made %q, deleted %q with %v, saved %q", made, r.VolumeId, r.Secrets, pv.Spec.CSI.VolumeHandle)
		}
		f.becomesFree(s)
	})

	t.Run("060_no_permission_to_protect", func(t *testing.T) {
		kubetest.NeedReal(t)
		f := copying(t, nil)
		s := f.snapshot(f.Namespace, "s", nil)
		f.Crash()
		user := f.Namespace + "-reader"
		_, err := f.Client.RbacV1().ClusterRoles().Create(t.Context(),
			&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: []rbacv1.PolicyRule{
				{
					APIGroups: []string{volumerules.SnapshotGroup}, Resources: []string{"volumesnapshots", "volumesnapshotcontents"},
					Verbs: []string{"get"},
				},
			}}, metav1.CreateOptions{})
		f.Must(err)
		_, err = f.Client.RbacV1().ClusterRoleBindings().Create(t.Context(),
			&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: user},
				RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
				Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}}}, metav1.CreateOptions{})
		f.Must(err)
		admin := f.snapshots
		f.snapshots, err = snapshotclient.NewForConfig(kube.ForCustomResources(f.ControlPlane.UserConfig(t, user)))
		f.Must(err)
		f.start()
		f.snapshots = admin
		f.Plugin.Next(create, csitest.Hang())
		claim := f.claim(restoring("data", "s"))
		f.Wait(create, 1)
		f.kept(s, false)
		f.Plugin.Release()
		f.saved(claim)
	})

	t.Run("063_065_clone", func(t *testing.T) {
		f := copying(t, nil)
		source := f.source(f.Namespace, "c", nil) // of another class
		f.Plugin.Next(create, csitest.Hang())
		claim := f.claim(cloning("data", "c"))
		f.Wait(create, 1)
		f.kept(source, true)
		if id := sourceAsked(f.Plugin.Calls(create)[0]).GetVolume().GetVolumeId(); id != f.Plugin.Volumes()[0].ID {
			t.Errorf("volume %q", id)
		}
		f.Plugin.Release()
		f.saved(claim)
		f.becomesFree(source)
	})

	t.Run("064_source_not_fit", func(t *testing.T) {
		f := copying(t, nil)
		type (
			claim  = corev1.PersistentVolumeClaim
			volume = corev1.PersistentVolume
		)
		tests := []struct {
			name   string
			change func(*claim, *volume)
			delete bool
			event  string
		}{
			{name: "pending", change: func(c *claim, _ *volume) { c.Status.Phase = corev1.ClaimPending }, event: "Pending, not Bound"},
			{name: "lost", change: func(c *claim, _ *volume) { c.Status.Phase = corev1.ClaimLost }, event: "Lost, not Bound"},
			{name: "deleted", delete: true, event: "being deleted"},
			{name: "large", change: func(c *claim, _ *volume) { size("2Gi")(c) }, event: "less than the 2Gi"},
			{
				name: "mode", change: func(_ *claim, v *volume) { v.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock) },
				event: "volume modes",
			},
			{name: "driver", change: func(_ *claim, v *volume) { v.Spec.CSI.Driver = "x" }, event: `driver "x"`},
			{name: "released", change: func(_ *claim, v *volume) { v.Status.Phase = corev1.VolumeReleased }, event: "Released, not Bound"},
			{name: "other-uid", change: func(_ *claim, v *volume) { v.Spec.ClaimRef.UID = "x" }, event: "not bound to it"},
			{name: "no-volume", change: func(c *claim, _ *volume) { c.Spec.VolumeName += "-gone" }, event: "not found"},
		}
		var sources []*claim
		for _, tt := range tests {
			source := f.source(f.Namespace, tt.name, tt.change)
			sources = append(sources, source)
			if tt.delete {
				f.remove(source)
			}
			f.claim(cloning("of-"+tt.name, tt.name))
		}
		f.claim(cloning("of-absent", "absent"))
		for _, tt := range tests {
			f.event("ProvisioningFailed", "PersistentVolumeClaim "+f.Namespace+"/"+tt.name+":", tt.event)
		}
		f.event("ProvisioningFailed", "PersistentVolumeClaim "+f.Namespace+"/absent:", "not found")
		f.Calls(create, 0)
		for _, s := range sources {
			f.kept(s, false)
		}
	})

	t.Run("066_source_deleted_during_a_clone", func(t *testing.T) {
		f := copying(t, nil)
		source := f.source(f.Namespace, "c", nil)
		f.Plugin.Next(create, csitest.Fail(codes.DeadlineExceeded, "slow"), csitest.Hang())
		claim := f.claim(cloning("data", "c"))
		f.Wait(create, 2)
		f.looksAgain("clone-protection", 1, func() { f.removeAtOnce(source) })
		f.kept(source, true)
		f.Plugin.Release()
		f.saved(claim)
		kubetest.Eventually(t, "the source is deleted", func(ctx context.Context) error {
			if now, err := f.live(ctx, source); err != nil || now != nil {
				return fmt.Errorf("finalizers %v, error %w", now, err)
			}
			return nil
		})
	})

	t.Run("066_restart_indeterminate_with_the_source_expanded_and_deleted", func(t *testing.T) {
		f := copying(t, nil)
		source := f.source(f.Namespace, "c", func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			c.Spec.StorageClassName = &f.class
		})
		f.Plugin.Next(create, csitest.DoAndFail(codes.Unavailable, "away"), csitest.Hang(), csitest.Hang())
		claim := f.claim(cloning("data", "c"))
		f.Wait(create, 2)
		f.Crash()
		f.expand(source)
		f.removeAtOnce(source)
		f.remove(claim)
		f.start()
		f.Wait(create, 3)
		f.kept(source, true)
		f.Plugin.Release()
		f.saved(claim)
		f.becomesFree(source)
	})

	// A claim that waits for nothing any more does not keep its source, though it is still there.
	t.Run("066_clone_deleted", func(t *testing.T) {
		for name, steps := range map[string][]csitest.Step{
			"066_never_begun": {csitest.Fail(codes.Internal, "broken")},
			"066_was_indeterminate": {
				csitest.Fail(codes.Aborted, "pending"), csitest.Fail(codes.Aborted, "pending"), csitest.Fail(codes.Internal, "broken"),
			},
			"066_no_good_reply": {csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.ContentSource = nil })},
		} {
			t.Run(name, func(t *testing.T) {
				f := copying(t, nil)
				source := f.source(f.Namespace, "c", nil)
				f.Plugin.Always(create, steps[len(steps)-1])
				f.Plugin.Next(create, steps...)
				claim := f.claim(cloning("data", "c"))
				f.Wait(create, 2)
				f.kept(source, true)
				f.remove(claim)
				f.becomesFree(source)
				kubetest.Eventually(t, "only Kubernetes keeps the claim", func(ctx context.Context) error {
					if now, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Get(ctx, "data",
						metav1.GetOptions{}); err != nil || !released(now) {
						return fmt.Errorf("finalizers %v, error %w", now.Finalizers, err)
					}
					return nil
				})
				f.settles()
				if n := f.Plugin.VolumeCount(); n != 1 {
					t.Errorf("%d volumes", n)
				}
			})
		}
	})

	// Sources that a process which is no more has left behind.
	t.Run("066_left_behind", func(t *testing.T) {
		f := copying(t, nil)
		f.Crash()
		left := func(c *corev1.PersistentVolumeClaim) { c.Finalizers = []string{kube.CloningProtection} }
		others := f.source(f.Namespace, "others", func(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) {
			left(c)
			v.Spec.CSI.Driver = "x"
		})
		plain := f.source(f.Namespace, "plain", func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) { left(c) })
		lost := f.source(f.Namespace, "lost", func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			left(c)
			c.Spec.VolumeName, c.Status.Phase = f.Namespace+"-gone", corev1.ClaimLost
		})
		used := f.source(f.Namespace, "used", func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) { left(c) })
		user := f.claim(func(c *corev1.PersistentVolumeClaim) { // without a provisioner yet
			cloning("user", "used")(c)
			c.Annotations = nil
		})
		f.start()
		f.becomesFree(plain)
		f.becomesFree(lost)
		f.kept(used, true)
		f.remove(user)
		f.becomesFree(used)
		f.kept(others, true)
	})

	// What this program does with a source is no reason to ask again.
	t.Run("063_091_infeasible_clone", func(t *testing.T) {
		f := copying(t, patient)
		source := f.source(f.Namespace, "c", nil)
		f.Plugin.Next(create, csitest.Fail(codes.InvalidArgument, "bad name"))
		claim := f.claim(cloning("data", "c"))
		f.event("ProvisioningFailed", "infeasible")
		patch := func(patch string) {
			t.Helper()
			_, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).Patch(
				t.Context(), source.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{},
			)
			f.Must(err)
		}
		patch(`{"metadata":{"finalizers":null}}`)
		f.settles()
		f.Calls(create, 1)
		patch(`{"metadata":{"annotations":{"a":"b"}}}`)
		f.saved(claim)
	})

	// Users can give their claims the finalizer.
	t.Run("068_forged_record", func(t *testing.T) {
		f := copying(t, func(c *Config) { patient(c); c.CrossNamespaceVolumeDataSource = true })
		ns := kubetest.Namespace(t, f.ControlPlane)
		f.source(ns, "s", nil)
		for _, name := range []string{"alive", "deleted"} {
			claim := f.claim(func(c *corev1.PersistentVolumeClaim) {
				fromRef(nil, &ns, kube.KindClaim, "s")(c)
				c.Name, c.Finalizers = name, []string{kube.ProvisioningFinalizer}
				if name == "deleted" {
					c.Annotations = nil // without a provisioner yet
				}
			})
			if name == "deleted" {
				f.remove(claim)
				_, err := kube.PatchMetadata(f.Context(), f.Client.CoreV1().PersistentVolumeClaims(f.Namespace), claim,
					kube.MetadataPatch{SetAnnotations: map[string]string{storagehelpers.AnnStorageProvisioner: f.Driver}})
				f.Must(err)
			}
			f.event("ProvisioningFailed", "no ReferenceGrant", "/"+name, ns+"/s", "Recreate")
		}
		f.Calls(create, 0)
	})

	t.Run("068_grants", func(t *testing.T) {
		f := copying(t, func(c *Config) { patient(c); c.CrossNamespaceVolumeDataSource = true })
		from := fmt.Sprintf(`{"group":"","kind":"PersistentVolumeClaim","namespace":%q}`, f.Namespace)
		claims, snapshots := `{"group":"","kind":"PersistentVolumeClaim"}`, `{"group":"snapshot.storage.k8s.io","kind":"VolumeSnapshot"`
		f.grant(f.Namespace, "in-the-namespace-of-the-claim", from, claims+","+snapshots+"}")
		tests := []struct {
			name   string
			source func(namespace string) metav1.Object
			claim  func(namespace string) func(*corev1.PersistentVolumeClaim)
			to     string
		}{
			{"any-claim", func(ns string) metav1.Object { return f.source(ns, "s", nil) },
				func(ns string) func(*corev1.PersistentVolumeClaim) {
					return fromRef(nil, &ns, kube.KindClaim, "s")
				}, claims},
			{"any-snapshot", func(ns string) metav1.Object { return f.snapshot(ns, "s", nil) },
				func(ns string) func(*corev1.PersistentVolumeClaim) {
					return fromRef(ptr.To(volumerules.SnapshotGroup), &ns, kube.KindSnapshot, "s")
				}, snapshots + `,"name":""}`},
			{"one-snapshot", func(ns string) metav1.Object { return f.snapshot(ns, "s", nil) },
				func(ns string) func(*corev1.PersistentVolumeClaim) {
					return fromRef(ptr.To(volumerules.SnapshotGroup), &ns, kube.KindSnapshot, "s")
				}, snapshots + `,"name":"s"}`},
		}
		var made []*corev1.PersistentVolumeClaim
		var namespaces []string
		var sources []metav1.Object
		for _, tt := range tests {
			ns := kubetest.Namespace(t, f.ControlPlane)
			f.grant(ns, "wrong-namespace", fmt.Sprintf(`{"group":"","kind":"PersistentVolumeClaim","namespace":%q}`, ns), tt.to)
			f.grant(ns, "wrong-kind", fmt.Sprintf(`{"group":"","kind":"Pod","namespace":%q}`, f.Namespace), tt.to)
			f.grant(ns, "wrong-group", fmt.Sprintf(`{"group":"x","kind":"PersistentVolumeClaim","namespace":%q}`, f.Namespace), tt.to)
			f.grant(
				ns, "to-others", from,
				`{"group":"x","kind":"PersistentVolumeClaim"},{"group":"snapshot.storage.k8s.io","kind":"Other"},`+snapshots+
					`,"name":"other"}`,
			)
			namespaces, sources = append(namespaces, ns), append(sources, tt.source(ns))
			claim := f.claim(func(c *corev1.PersistentVolumeClaim) { tt.claim(ns)(c); c.Name = tt.name })
			f.event("ProvisioningFailed", "no ReferenceGrant", f.Namespace+"/"+tt.name, ns+"/s")
			made = append(made, claim)
		}
		f.Calls(create, 0)
		for i, tt := range tests {
			f.Plugin.Next(create, csitest.Hang())
			f.grant(namespaces[i], "right", from, tt.to)
			f.Wait(create, i+1)
			f.kept(sources[i], true)
			f.Plugin.Release()
			f.saved(made[i])
			f.becomesFree(sources[i])
		}
	})

	t.Run("069_sweep", func(t *testing.T) {
		const interval = 100 * time.Millisecond
		f := copying(t, func(c *Config) { c.SnapshotOrphanSweepInterval, c.CrossNamespaceVolumeDataSource = interval, true })
		left := func(s *snapshotv1.VolumeSnapshot, _ *snapshotv1.VolumeSnapshotContent) {
			s.Finalizers = []string{kube.SnapshotProtection}
		}
		of := func(name string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
			t.Helper()
			return f.claim(func(c *corev1.PersistentVolumeClaim) { // without a provisioner yet: only the sweep detects its deletion
				change(c)
				c.Name, c.Annotations = name, nil
			})
		}
		there := kubetest.Namespace(t, f.ControlPlane)
		users := []*corev1.PersistentVolumeClaim{
			of("source", restoring("", "by-source")),
			of("ref", fromRef(ptr.To(volumerules.SnapshotGroup), nil, kube.KindSnapshot, "by-ref")),
			of("ref-elsewhere", fromRef(ptr.To(volumerules.SnapshotGroup), &there, kube.KindSnapshot, "elsewhere")),
		}
		of("group", fromRef(ptr.To("x"), nil, kube.KindSnapshot, "orphan")) // means another kind
		f.settles()                                                         // the claims are known
		kept := []*snapshotv1.VolumeSnapshot{
			f.snapshot(f.Namespace, "by-source", left), f.snapshot(f.Namespace, "by-ref", left), f.snapshot(there, "elsewhere", left),
		}
		others := f.snapshot(f.Namespace, "others", func(s *snapshotv1.VolumeSnapshot, c *snapshotv1.VolumeSnapshotContent) {
			left(s, c)
			c.Spec.Driver = "x"
		})
		f.becomesFree(f.snapshot(f.Namespace, "orphan", left))
		f.looksAgain("snapshot-protection", 8, func() {})
		for i, s := range kept {
			f.kept(s, true)
			f.remove(users[i])
			f.becomesFree(s)
		}
		f.kept(others, true)
	})

	snapshots := schema.GroupResource{Group: volumerules.SnapshotGroup, Resource: "volumesnapshots"}
	const removeFinalizer = "Removing the source finalizer is forbidden"
	for name, tt := range map[string]struct {
		answer   func(http.ResponseWriter) // to every request for a snapshot
		restores bool
		log      string
	}{
		"without_the_CRDs": {func(w http.ResponseWriter) { http.Error(w, "404 page not found", http.StatusNotFound) }, true, ""},
		"without_permission": {
			func(w http.ResponseWriter) { refuse(w, apierrors.NewForbidden(snapshots, "s", nil)) }, true, "Grant get and patch",
		},
		"of_a_driver_that_does_not_restore": {
			func(w http.ResponseWriter) { http.Error(w, "no", http.StatusInternalServerError) }, false, "",
		},
	} {
		t.Run("069_claim_deleted_"+name, func(t *testing.T) {
			capabilities := []csi.ControllerServiceCapability_RPC_Type{csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME}
			if tt.restores {
				capabilities = append(capabilities, csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT)
			}
			f := newFixture(t, csitest.Config{Controller: capabilities}, nil)
			var requests atomic.Int32
			var err error
			f.snapshots, err = snapshotclient.NewForConfig(kubetest.Proxy(t, f.ControlPlane.Config(),
				func(w http.ResponseWriter, _ *http.Request, _ http.Handler) { requests.Add(1); tt.answer(w) }))
			f.Must(err)
			f.start()
			lines := f.restartLogged()
			f.makeClass(nil)
			claim := f.claim(restoring("data", "s"))
			f.event("ProvisioningFailed", "s")
			if tt.restores {
				f.looksAgain("snapshot-protection", 1, func() { f.removeAtOnce(claim) })
			} else {
				f.removeAtOnce(claim)
				f.claimIs("is deleted", isGone)
			}
			f.settles()
			if n := f.metric("workqueue_retries_total", "name", "snapshot-protection"); n > 0 || !tt.restores && requests.Load() > 0 {
				t.Errorf("%v retries, %d requests", n, requests.Load())
			}
			if got := lines(removeFinalizer, tt.log); (len(got) > 0) != (tt.log != "") {
				t.Errorf("logged %q, want %q", lines(removeFinalizer), tt.log)
			}
			kubetest.Eventually(t, "/statusz shows the failure", func(context.Context) error { // after the log line
				if failing := f.failing("snapshot-protection"); (len(failing) > 0) != (tt.log != "") {
					return fmt.Errorf("%+v", failing)
				}
				return nil
			})
		})
	}

	t.Run("069_sweep_before_all_claims_are_known", func(t *testing.T) {
		f := copying(t, func(c *Config) { c.SnapshotOrphanSweepInterval = 100 * time.Millisecond })
		f.settles()
		p := f.c.claimLoop.Load().sources
		beginsAt(t, p.claims, "9223372036854775807")
		orphan := f.snapshot(f.Namespace, "orphan", func(s *snapshotv1.VolumeSnapshot, _ *snapshotv1.VolumeSnapshotContent) {
			s.Finalizers = []string{kube.SnapshotProtection}
		})
		f.looksAgain("snapshot-protection", 3, func() {})
		f.kept(orphan, true)
		beginsAt(t, p.claims, "1")
		f.saved(f.claim(nil)) // the cache receives a claim
		f.becomesFree(orphan)
	})

	t.Run("069_no_sweep", func(t *testing.T) {
		f := copying(t, func(c *Config) { c.SnapshotOrphanSweepInterval = 0 })
		orphan := f.snapshot(f.Namespace, "orphan", func(s *snapshotv1.VolumeSnapshot, _ *snapshotv1.VolumeSnapshotContent) {
			s.Finalizers = []string{kube.SnapshotProtection}
		})
		used := f.snapshot(f.Namespace, "used", nil)
		f.saved(f.claim(restoring("data", "used")))
		f.becomesFree(used)
		f.kept(orphan, true)
	})

	t.Run("070_claim_deleted_while_its_restore_goes_on", func(t *testing.T) {
		for name, tt := range map[string]struct {
			protection Protection
			steps      []csitest.Step
		}{
			"070_indeterminate": {
				ProtectionOnRetry, []csitest.Step{csitest.DoAndFail(codes.DeadlineExceeded, "slow"), csitest.Hang()},
			},
			"070_unprotected": {ProtectionOff, []csitest.Step{csitest.DoAndFail(codes.DeadlineExceeded, "slow"), csitest.Hang()}},
			"070_first_call":  {ProtectionOnRetry, []csitest.Step{csitest.Hang()}},
		} {
			t.Run(name, func(t *testing.T) {
				f := copying(t, func(c *Config) {
					c.SnapshotOrphanSweepInterval, c.ProvisioningProtection = 50*time.Millisecond, tt.protection
				})
				s := f.snapshot(f.Namespace, "s", nil)
				f.Plugin.Next(create, tt.steps...)
				claim := f.claim(restoring("data", "s"))
				f.Wait(create, len(tt.steps))
				f.looksAgain("snapshot-protection", 4, func() { f.removeAtOnce(claim) })
				f.kept(s, true)
				f.Plugin.Release()
				f.saved(claim)
				f.becomesFree(s)
			})
		}
	})

	t.Run("071_two_claims_of_one_snapshot", func(t *testing.T) {
		f := copying(t, func(c *Config) { c.SnapshotOrphanSweepInterval = 50 * time.Millisecond })
		s := f.snapshot(f.Namespace, "s", nil)
		f.Plugin.Next(create, csitest.Hang())
		slow := f.claim(restoring("slow", "s"))
		f.Wait(create, 1)
		fast := f.claim(restoring("fast", "s"))
		f.saved(fast)
		f.removeAtOnce(slow) // the call alone is what needs the snapshot now
		kubetest.Eventually(t, "the claim is deleted", func(ctx context.Context) error {
			if now, err := f.live(ctx, slow); err != nil || now != nil {
				return errors.New("it is not")
			}
			return nil
		})
		f.looksAgain("snapshot-protection", 4, func() {})
		f.kept(s, true)
		f.Plugin.Release()
		f.saved(slow)
		f.becomesFree(s)
	})
}
