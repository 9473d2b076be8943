// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

func TestMain(m *testing.M) { kubetest.Main(m) }

const driver = "drv.example.com"

// TestStubsShare: what many objects of other drivers have in common is in memory once.
func TestStubsShare(t *testing.T) {
	stub := func(obj runtime.Object) any {
		stub, err := Trim(driver)(obj)
		if err != nil {
			t.Fatal(err)
		}
		return stub
	}
	volume := func() *corev1.PersistentVolume {
		return stub(&corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{PersistentVolumeSource: corev1.PersistentVolumeSource{
			CSI: &corev1.CSIPersistentVolumeSource{Driver: strings.Clone("other")}}}}).(*corev1.PersistentVolume)
	}
	claim := func() *corev1.PersistentVolumeClaim {
		return stub(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: strings.Clone("ns")},
			Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: ptr.To(strings.Clone("c"))}}).(*corev1.PersistentVolumeClaim)
	}
	if v, w := volume(), volume(); v.Spec.CSI != w.Spec.CSI {
		t.Error("each volume has its own source")
	}
	a, b := claim(), claim()
	if unsafe.StringData(*a.Spec.StorageClassName) != unsafe.StringData(*b.Spec.StorageClassName) ||
		unsafe.StringData(a.Namespace) != unsafe.StringData(b.Namespace) {
		t.Error("each claim has its own names")
	}
}

func TestTrim(t *testing.T) {
	meta := metav1.ObjectMeta{
		Name: "x", Namespace: "ns", UID: "u", ResourceVersion: "7", Labels: map[string]string{"l": "v"}, Finalizers: []string{"f"},
		Annotations:   map[string]string{corev1.LastAppliedConfigAnnotation: "{}", "a": "b"},
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}},
	}
	with := func(annotations map[string]string) metav1.ObjectMeta {
		m := *meta.DeepCopy()
		for k, v := range annotations {
			m.Annotations[k] = v
		}
		return m
	}
	whole := func(annotations map[string]string) metav1.ObjectMeta {
		m := with(annotations)
		m.ManagedFields = nil
		delete(m.Annotations, corev1.LastAppliedConfigAnnotation)
		return m
	}
	unlabeled := func(m metav1.ObjectMeta) metav1.ObjectMeta {
		m.Labels = nil
		return m
	}
	ofCluster := func(m metav1.ObjectMeta) metav1.ObjectMeta {
		m.Namespace = ""
		return m
	}
	stubbed := metav1.ObjectMeta{Name: "x", Namespace: "ns", UID: "u", ResourceVersion: "7"}
	deleted := func(m metav1.ObjectMeta) metav1.ObjectMeta {
		m.DeletionTimestamp = &metav1.Time{}
		return m
	}
	volume := func(driver string) corev1.PersistentVolumeSpec {
		return corev1.PersistentVolumeSpec{
			ClaimRef: &corev1.ObjectReference{Namespace: "n", Name: "c", UID: "cu", ResourceVersion: "3"}, MountOptions: []string{"o"},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: "h"},
			},
		}
	}
	pv := func(m metav1.ObjectMeta, spec corev1.PersistentVolumeSpec, status corev1.PersistentVolumeStatus) *corev1.PersistentVolume {
		return &corev1.PersistentVolume{ObjectMeta: m, Spec: spec, Status: status}
	}
	claim := func(m metav1.ObjectMeta, spec corev1.PersistentVolumeClaimSpec) *corev1.PersistentVolumeClaim {
		return &corev1.PersistentVolumeClaim{ObjectMeta: m, Spec: spec}
	}
	withHealth := func(pvc *corev1.PersistentVolumeClaim) *corev1.PersistentVolumeClaim {
		pvc.Status.HealthStatus = &corev1.VolumeHealthStatus{HealthConditions: []corev1.VolumeHealthCondition{{Message: "m"}}}
		return pvc
	}
	csiNode := func(m metav1.ObjectMeta, drivers ...storagev1.CSINodeDriver) *storagev1.CSINode {
		return &storagev1.CSINode{ObjectMeta: m, Spec: storagev1.CSINodeSpec{Drivers: drivers}}
	}
	provisioned := map[string]string{storagehelpers.AnnDynamicallyProvisioned: driver}
	ours := map[string]string{storagehelpers.AnnStorageProvisioner: driver}
	others := map[string]string{storagehelpers.AnnStorageProvisioner: "other", storagehelpers.AnnBetaStorageProvisioner: driver}
	bound := corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound}
	inTree := corev1.PersistentVolumeSpec{PersistentVolumeSource: corev1.PersistentVolumeSource{
		GCEPersistentDisk: &corev1.GCEPersistentDiskVolumeSource{PDName: "d"},
	}}
	stubSpec := corev1.PersistentVolumeSpec{
		ClaimRef:               &corev1.ObjectReference{Namespace: "n", Name: "c", UID: "cu"},
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "other"}},
	}
	claimSpec := corev1.PersistentVolumeClaimSpec{VolumeName: "v", StorageClassName: ptr.To("c")}
	fullSpec := *claimSpec.DeepCopy()
	fullSpec.AccessModes = []corev1.PersistentVolumeAccessMode{"RWO"}
	pendingSpec := corev1.PersistentVolumeClaimSpec{DataSourceRef: &corev1.TypedObjectReference{Name: "s"}}
	attachmentSpec := storagev1.VolumeAttachmentSpec{
		Attacher: "other", NodeName: "n", Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To("v")},
	}
	tests := map[string]struct{ in, want any }{
		"volume of the driver": {pv(with(nil), volume(driver), bound), pv(whole(nil), volume(driver), bound)},
		"volume provisioned by the driver": {
			pv(with(provisioned), volume("other"), bound), pv(whole(provisioned), volume("other"), bound),
		},
		"volume of another driver": {
			pv(with(nil), volume("other"), corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound, Message: "m"}),
			pv(stubbed, stubSpec, bound),
		},
		"volume of an in-tree plugin": {pv(with(nil), inTree, bound), pv(whole(nil), inTree, bound)},
		"claim of the driver":         {withHealth(claim(with(ours), fullSpec)), claim(unlabeled(whole(ours)), fullSpec)},
		"claim of another driver":     {claim(with(others), fullSpec), claim(stubbed, claimSpec)},
		"pending claim of another driver": {
			claim(deleted(with(nil)), pendingSpec), claim(deleted(stubbed), pendingSpec),
		},
		"attachment of the driver": {
			&storagev1.VolumeAttachment{ObjectMeta: with(nil), Spec: storagev1.VolumeAttachmentSpec{Attacher: driver}},
			&storagev1.VolumeAttachment{ObjectMeta: whole(nil), Spec: storagev1.VolumeAttachmentSpec{Attacher: driver}},
		},
		"attachment of another driver": {
			&storagev1.VolumeAttachment{
				ObjectMeta: with(nil), Spec: attachmentSpec, Status: storagev1.VolumeAttachmentStatus{Attached: true},
			},
			&storagev1.VolumeAttachment{ObjectMeta: stubbed, Spec: attachmentSpec},
		},
		"CSINode": {
			&storagev1.CSINode{
				ObjectMeta: with(nil), Status: storagev1.CSINodeStatus{StorageHealth: []storagev1.StorageHealth{{Name: driver}}},
				Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: "other"}, {Name: driver, NodeID: "i"}}},
			},
			csiNode(whole(nil), storagev1.CSINodeDriver{Name: driver, NodeID: "i"}),
		},
		"Node": {
			&metav1.PartialObjectMetadata{ObjectMeta: ofCluster(with(nil))},
			&metav1.PartialObjectMetadata{
				ObjectMeta: metav1.ObjectMeta{
					Name: "x", UID: "u", ResourceVersion: "7", Labels: meta.Labels, Finalizers: meta.Finalizers,
				},
			},
		},
		"StorageClass": {
			&storagev1.StorageClass{ObjectMeta: with(nil), Provisioner: "other"},
			&storagev1.StorageClass{ObjectMeta: whole(nil), Provisioner: "other"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := Trim(driver)(tt.in)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestMetadataPatch(t *testing.T) {
	object := func(finalizers []string, annotations map[string]string) *corev1.PersistentVolume {
		return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{UID: "u", Finalizers: finalizers, Annotations: annotations}}
	}
	tests := map[string]struct {
		object *corev1.PersistentVolume
		change MetadataPatch
		want   string // operations after the test of the UID
	}{
		"nothing": {
			object([]string{"a"}, nil),
			MetadataPatch{AddFinalizers: []string{"a"}, RemoveFinalizers: []string{"b"}, RemoveAnnotations: []string{"x"}}, "",
		},
		"first finalizer": {
			object(nil, nil), MetadataPatch{AddFinalizers: []string{"a"}},
			`{"op":"test","path":"/metadata/finalizers","value":null},{"op":"add","path":"/metadata/finalizers","value":["a"]}`,
		},
		"another finalizer": {
			object([]string{"a"}, nil), MetadataPatch{AddFinalizers: []string{"b"}},
			`{"op":"test","path":"/metadata/finalizers","value":["a"]},{"op":"replace","path":"/metadata/finalizers","value":["a","b"]}`,
		},
		"remove one at any position": {
			object([]string{"b", "a", "b", "c"}, nil), MetadataPatch{RemoveFinalizers: []string{"b"}},
			`{"op":"test","path":"/metadata/finalizers","value":["b","a","b","c"]},` +
				`{"op":"replace","path":"/metadata/finalizers","value":["a","c"]}`,
		},
		"remove the last": {
			object([]string{"a"}, nil), MetadataPatch{RemoveFinalizers: []string{"a"}},
			`{"op":"test","path":"/metadata/finalizers","value":["a"]},{"op":"remove","path":"/metadata/finalizers"}`,
		},
		"test of the annotation of an object without any": {
			object([]string{"a"}, nil), MetadataPatch{RemoveFinalizers: []string{"a"}, Tests: map[string]any{AnnotationPath("x"): nil}},
			`{"op":"test","path":"/metadata/annotations","value":null},` +
				`{"op":"test","path":"/metadata/finalizers","value":["a"]},{"op":"remove","path":"/metadata/finalizers"}`,
		},
		"first annotation": {
			object(nil, nil), MetadataPatch{SetAnnotations: map[string]string{"a/b": "c"}},
			`{"op":"test","path":"/metadata/annotations","value":null},{"op":"add","path":"/metadata/annotations","value":{"a/b":"c"}}`,
		},
		"another annotation, with escapes": {
			object(nil, map[string]string{"x": "y"}), MetadataPatch{SetAnnotations: map[string]string{"a/b~c": "d", "x": "y"}},
			`{"op":"add","path":"/metadata/annotations/a~1b~0c","value":"d"}`,
		},
		"remove an annotation": {
			object(nil, map[string]string{"a/b": "c"}), MetadataPatch{RemoveAnnotations: []string{"a/b"}},
			`{"op":"test","path":"/metadata/annotations/a~1b","value":"c"},{"op":"remove","path":"/metadata/annotations/a~1b"}`,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := tt.change.JSONPatch(tt.object)
			if err != nil {
				t.Fatal(err)
			}
			want := ""
			if tt.want != "" {
				want = `[{"op":"test","path":"/metadata/uid","value":"u"},` + tt.want + `]`
			}
			if diff := cmp.Diff(want, string(got)); diff != "" {
				t.Error(diff)
			}
			if tt.change.AppliedTo(tt.object) != (tt.want == "") {
				t.Error("Made says otherwise")
			}
			tt.change.Apply(tt.object)
			if !tt.change.AppliedTo(tt.object) {
				t.Errorf("not made by Apply: %+v", tt.object.ObjectMeta)
			}
		})
	}
}

// live is a volume at the real API server.
func live(t *testing.T, change func(*corev1.PersistentVolume)) (*kubetest.ControlPlane, *corev1.PersistentVolume) {
	t.Helper()
	c := kubetest.Get(t, kubetest.WithAudit())
	return c, createVolume(t, c, change)
}

// createVolume creates a volume. Its name is new.
func createVolume(t *testing.T, c *kubetest.ControlPlane, change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
	t.Helper()
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "pv-", Finalizers: []string{"example.com/theirs"}},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Capacity: corev1.ResourceList{
				corev1.ResourceStorage: resource.MustParse("1Gi"),
			},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: "h"},
			},
		},
	}
	if change != nil {
		change(pv)
	}
	pv, err := c.Client().CoreV1().PersistentVolumes().Create(t.Context(), pv, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pv
}

func TestChangeAtTheAPIServer(t *testing.T) {
	add := MetadataPatch{AddFinalizers: []string{"example.com/ours"}, SetAnnotations: map[string]string{"example.com/a": "1"}}
	t.Run("is one request", func(t *testing.T) {
		c, pv := live(t, nil)
		mark, _ := c.AuditOffset()
		got, err := PatchMetadata(t.Context(), c.Client().CoreV1().PersistentVolumes(), pv, add)
		if err != nil || !add.AppliedTo(got) || len(got.Finalizers) != 3 { // and pv-protection
			t.Fatalf("%v: %v", err, got.ObjectMeta)
		}
		if _, err := PatchMetadata(t.Context(), c.Client().CoreV1().PersistentVolumes(), got, add); err != nil {
			t.Fatal(err)
		}
		records, err := c.AuditSince(mark, "")
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, r := range records {
			if r.Object.Name == pv.Name {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%d requests, want one", n)
		}
	})
	t.Run("keeps what others did meanwhile", func(t *testing.T) {
		c, pv := live(t, nil)
		volumes := c.Client().CoreV1().PersistentVolumes()
		other := MetadataPatch{AddFinalizers: []string{"example.com/new"}, RemoveFinalizers: []string{"example.com/theirs"}}
		if _, err := PatchMetadata(t.Context(), volumes, pv, other); err != nil {
			t.Fatal(err)
		}
		got, err := PatchMetadata(t.Context(), volumes, pv, add) // with the old state
		finalizers := fmt.Sprint(got.Finalizers)
		if err != nil || strings.Contains(finalizers, "theirs") || !strings.Contains(finalizers, "new") || !add.AppliedTo(got) {
			t.Errorf("%v: %v", err, got.Finalizers)
		}
	})
	t.Run("does not touch another object of the name", func(t *testing.T) {
		c, pv := live(t, nil)
		stale := pv.DeepCopy()
		stale.UID = "another"
		if _, err := PatchMetadata(t.Context(), c.Client().CoreV1().PersistentVolumes(), stale, add); !apierrors.IsNotFound(err) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a deleted object is NotFound", func(t *testing.T) {
		c := kubetest.Get(t, kubetest.WithAudit())
		deleted := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "never", UID: "x"}}
		if _, err := PatchMetadata(t.Context(), c.Client().CoreV1().PersistentVolumes(), deleted, add); !apierrors.IsNotFound(err) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("updates where patching is forbidden", func(t *testing.T) {
		c, pv := live(t, nil)
		client := restricted(t, c, []string{"get", "update"})
		got, err := PatchMetadata(t.Context(), client.CoreV1().PersistentVolumes(), pv, add)
		if err != nil || !add.AppliedTo(got) {
			t.Errorf("%v: %v", err, got.ObjectMeta)
		}
	})
	t.Run("tests before an update", func(t *testing.T) {
		c, pv := live(t, nil)
		client := restricted(t, c, []string{"get", "update"}).CoreV1().PersistentVolumes()
		other := MetadataPatch{SetAnnotations: map[string]string{"example.com/b": "1"}}
		pv, err := PatchMetadata(t.Context(), c.Client().CoreV1().PersistentVolumes(), pv, other)
		if err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			path  string
			value any
			want  bool
		}{
			{"/spec/persistentVolumeReclaimPolicy", "Other", false},
			{"/metadata/annotations/example.com~1b", nil, false},
			{"/metadata/annotations/example.com~1b", "1", true},
			{"/metadata/deletionTimestamp", nil, true},
		} {
			change := MetadataPatch{SetAnnotations: map[string]string{"example.com/a": fmt.Sprint(tt)},
				Tests: map[string]any{tt.path: tt.value}}
			for verb, w := range map[string]Writer[*corev1.PersistentVolume]{
				"patch": c.Client().CoreV1().PersistentVolumes(), "update": client,
			} {
				change.SetAnnotations["example.com/a"] += verb
				got, err := PatchMetadata(t.Context(), w, pv, change)
				if (err == nil) != tt.want || !tt.want && !IsPatchTestFailed(err) || change.AppliedTo(got) != tt.want {
					t.Errorf("%s with %v: %v: %v", verb, tt, err, got.ObjectMeta)
				}
			}
		}
	})
	t.Run("returns both errors without permissions", func(t *testing.T) {
		c, pv := live(t, nil)
		_, err := PatchMetadata(t.Context(), restricted(t, c, []string{"get"}).CoreV1().PersistentVolumes(), pv, add)
		if text := fmt.Sprint(err); !apierrors.IsForbidden(err) ||
			!strings.Contains(text, "cannot patch") || !strings.Contains(text, "cannot update") {
			t.Errorf("got %v", err)
		}
	})
}

// unstoring is a writer whose patches have no effect, as with a mutating webhook that reverts them.
type unstoring struct {
	typedcorev1.PersistentVolumeInterface
}

func (u unstoring) Patch(
	ctx context.Context, name string, _ types.PatchType, _ []byte, _ metav1.PatchOptions, _ ...string,
) (*corev1.PersistentVolume, error) {
	return u.Get(ctx, name, metav1.GetOptions{})
}

func TestPatchWithoutEffectIsAnError(t *testing.T) {
	c, pv := live(t, nil)
	volumes := NewMutationCache(informersFor(t, c, c.Client()).Volumes())
	for name, change := range map[string]MetadataPatch{
		"annotation":        {SetAnnotations: map[string]string{"a": "b"}},
		"finalizer":         {AddFinalizers: []string{"example.com/f"}},
		"removed finalizer": {RemoveFinalizers: []string{"example.com/theirs"}},
	} {
		if _, err := volumes.Patch(t.Context(), unstoring{c.Client().CoreV1().PersistentVolumes()}, pv, change); !IsRefused(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestMissingPatchPermissionIsLoggedOncePerCache checks [MutationCache.Patch] and
// [MutationCache.UpdateInstead] for a user without the verb patch.
func TestMissingPatchPermissionIsLoggedOncePerCache(t *testing.T) {
	c, pv := live(t, nil)
	writer := restricted(t, c, []string{"get", "update"}).CoreV1().PersistentVolumes()
	forbidden := apierrors.NewForbidden(corev1.Resource("persistentvolumes"), pv.Name, nil)
	for cache := range 2 {
		var logged strings.Builder
		ctx := klog.NewContext(t.Context(), funcr.New(func(_, args string) { logged.WriteString(args + "\n") }, funcr.Options{}))
		volumes := NewMutationCache(informersFor(t, c, c.Client()).Volumes())
		for i := range 2 {
			change := MetadataPatch{SetAnnotations: map[string]string{"n": fmt.Sprint(cache, i)}}
			written, err := volumes.Patch(ctx, writer, pv, change)
			if err != nil || !change.AppliedTo(written) {
				t.Errorf("patch: %v: %v", err, written.ObjectMeta)
			}
			if got, ok := volumes.Get(pv.Name); !ok || got.ResourceVersion != written.ResourceVersion {
				t.Error("the write was not recorded")
			}
			pv = written
		}
		label := func(v *corev1.PersistentVolume) *corev1.PersistentVolume {
			metav1.SetMetaDataLabel(&v.ObjectMeta, "l", fmt.Sprint(cache))
			return v
		}
		var err error
		if pv, err = volumes.UpdateInstead(ctx, writer, pv, label, forbidden); err != nil || pv.Labels["l"] != fmt.Sprint(cache) {
			t.Errorf("update: %v: %v", err, pv.ObjectMeta)
		}
		if n := strings.Count(logged.String(), "No permission to patch"); n != 1 {
			t.Errorf("cache %d logged %d times:\n%s", cache, n, logged.String())
		}
	}
}

// conflicting is a client of a user without the verb patch. It reads a state that no watch has observed, and its updates conflict.
type conflicting struct {
	typedcorev1.PersistentVolumeInterface
}

func (c conflicting) Get(ctx context.Context, name string, o metav1.GetOptions) (*corev1.PersistentVolume, error) {
	pv, err := c.PersistentVolumeInterface.Get(ctx, name, o)
	if err == nil {
		pv.ResourceVersion = "1000000000"
	}
	return pv, err
}

func (conflicting) Update(_ context.Context, pv *corev1.PersistentVolume, _ metav1.UpdateOptions) (*corev1.PersistentVolume, error) {
	return nil, apierrors.NewConflict(corev1.Resource("persistentvolumes"), pv.Name, errors.New("simulated"))
}

func (conflicting) Patch(_ context.Context, name string, _ types.PatchType, _ []byte, _ metav1.PatchOptions, _ ...string,
) (*corev1.PersistentVolume, error) {
	return nil, apierrors.NewForbidden(corev1.Resource("persistentvolumes"), name, nil)
}

// TestFailedUpdateIsNotRecorded: the update instead of a forbidden patch fails. The cache must not show what was not stored: a finalizer
// that is missing, or, without the last one, an object as deleted.
func TestFailedUpdateIsNotRecorded(t *testing.T) {
	c := kubetest.Get(t)
	pv := createVolume(t, c, nil)
	volumes := NewMutationCache(informersFor(t, c, c.Client()).Volumes())
	change := MetadataPatch{AddFinalizers: []string{"example.com/protection"}}
	if _, err := volumes.Patch(t.Context(), conflicting{c.Client().CoreV1().PersistentVolumes()}, pv, change); !apierrors.IsConflict(err) {
		t.Errorf("the error is %v", err)
	}
	if got, ok := volumes.Get(pv.Name); ok && change.AppliedTo(got) {
		t.Errorf("the cache shows %v", got.GetFinalizers())
	}
}

// restricted returns a client of a user who may use only these verbs on PersistentVolumes.
func restricted(t *testing.T, c *kubetest.ControlPlane, verbs []string) kubernetes.Interface {
	t.Helper()
	name := strings.ToLower(strings.NewReplacer("/", "-", "_", "-").Replace(t.Name()))
	rule := rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: verbs}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{rule}}
	if _, err := c.Client().RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}},
	}
	if _, err := c.Client().RbacV1().ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(c.UserConfig(t, name))
	if err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the role is in force", func(ctx context.Context) error {
		_, err := client.CoreV1().PersistentVolumes().Get(ctx, "nothing", metav1.GetOptions{})
		if apierrors.IsForbidden(err) {
			return err
		}
		return nil
	})
	return client
}

func informersFor(t *testing.T, c *kubetest.ControlPlane, cfg kubernetes.Interface) *Informers {
	t.Helper()
	meta, err := metadata.NewForConfig(c.Config())
	if err != nil {
		t.Fatal(err)
	}
	return NewInformers(cfg, meta, driver)
}

// TestOwnWritesAreSeenAtOnce races the overlay against the watch.
func TestOwnWritesAreSeenAtOnce(t *testing.T) {
	c, pv := live(t, func(pv *corev1.PersistentVolume) { pv.Spec.CSI.VolumeHandle = rand.String(10) })
	informers := informersFor(t, c, c.Client())
	volumes := informers.Volumes()
	own := NewMutationCache(volumes)
	ctx, stop := context.WithCancel(t.Context())
	informers.Start(ctx)
	defer informers.Shutdown()
	defer stop()
	kubetest.Eventually(t, "the watch runs", func(context.Context) error { return informers.Synced() })
	client := c.Client().CoreV1().PersistentVolumes()
	for i := range 200 {
		change := MetadataPatch{SetAnnotations: map[string]string{"n": fmt.Sprint(i)}}
		got, ok := own.Get(pv.Name)
		if !ok {
			t.Fatal("the volume is missing")
		}
		changed, err := PatchMetadata(t.Context(), client, got, change)
		if err := own.RecordWrite(got, changed, err); err != nil {
			t.Fatal(err)
		}
		if seen, _ := own.Get(pv.Name); seen.Annotations["n"] != fmt.Sprint(i) {
			t.Fatalf("write %d is not visible, but %q", i, seen.Annotations["n"])
		}
		if seen := byHandle(own, pv); len(seen) != 1 || seen[0].Annotations["n"] != fmt.Sprint(i) {
			t.Fatalf("write %d is not visible by the handle, but %d objects", i, len(seen))
		}
	}
	unseen, err := PatchMetadata(t.Context(), client, pv, MetadataPatch{SetAnnotations: map[string]string{"n": "unseen"}})
	if err != nil {
		t.Fatal(err)
	}
	if live, exists, err := own.Refetch(t.Context(), client, pv); err != nil || !exists || live.ResourceVersion != unseen.ResourceVersion {
		t.Fatalf("exists %t, error %v", exists, err)
	}
	if seen, _ := own.Get(pv.Name); seen.ResourceVersion != unseen.ResourceVersion {
		t.Fatal("a live read is not observed")
	}
	other := unseen.DeepCopy()
	other.UID = "other"
	if _, exists, err := own.Refetch(t.Context(), client, other); err != nil || exists {
		t.Fatalf("an object with another UID: exists %t, error %v", exists, err)
	}
	// Removing the last finalizer of a deleted object hides it, however slow the watch is.
	if err := client.Delete(t.Context(), pv.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the deletionTimestamp is observed", func(context.Context) error {
		if got, _ := own.Get(pv.Name); got.DeletionTimestamp == nil {
			return fmt.Errorf("no deletionTimestamp")
		}
		return nil
	})
	got, _ := own.Get(pv.Name)
	changed, err := PatchMetadata(t.Context(), client, got, MetadataPatch{RemoveFinalizers: got.Finalizers})
	if err := own.RecordWrite(got, changed, err); err != nil {
		t.Fatal(err)
	}
	if got, ok := own.Get(pv.Name); ok || len(byHandle(own, pv)) > 0 {
		t.Fatalf("still there: %v", got.ObjectMeta)
	}
	if _, exists, err := own.Refetch(t.Context(), client, got); err != nil || exists {
		t.Fatalf("a deleted object: exists %t, error %v", exists, err)
	}
	// A new object with the same name is visible.
	again := pv.DeepCopy()
	again.ObjectMeta = metav1.ObjectMeta{Name: pv.Name}
	if again, err = client.Create(t.Context(), again, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	own.Observe(again)
	if seen := byHandle(own, pv); len(seen) != 1 || seen[0].UID != again.UID {
		t.Fatalf("the new object is not visible by the handle, but %d objects", len(seen))
	}
	kubetest.Eventually(t, "the new object is observed, and no entry of the old one is left", func(context.Context) error {
		own.prune()
		entries := len(own.written) + len(own.deleted)
		if got, ok := own.Get(pv.Name); !ok || got.UID == pv.UID || entries > 0 {
			return fmt.Errorf("%t, %d entries", ok, entries)
		}
		return nil
	})
}

// byHandle returns the objects that have the volume handle of pv.
func byHandle(own *MutationCache[*corev1.PersistentVolume], pv *corev1.PersistentVolume) []*corev1.PersistentVolume {
	handle := pv.Spec.CSI.VolumeHandle
	return slices.DeleteFunc(own.ByIndex(ByHandle, Bucket(handle)), func(other *corev1.PersistentVolume) bool {
		return other.Spec.CSI.VolumeHandle != handle
	})
}

// TestMutationCacheForgetsObservedWrites writes and deletes more objects than the cache may have entries.
func TestMutationCacheForgetsObservedWrites(t *testing.T) {
	c, first := live(t, nil)
	informers := informersFor(t, c, c.Client())
	volumes := informers.Volumes()
	own := NewMutationCache(volumes)
	ctx, stop := context.WithCancel(t.Context())
	informers.Start(ctx)
	defer informers.Shutdown()
	defer stop()
	kubetest.Eventually(t, "the watch runs", func(context.Context) error { return informers.Synced() })
	client := c.Client().CoreV1().PersistentVolumes()
	await := func(name string, want bool) {
		kubetest.Eventually(t, fmt.Sprintf("%s is observed as existing: %t", name, want), func(context.Context) error {
			if _, ok := volumes.Get(name); ok != want {
				return fmt.Errorf("existing: %t", ok)
			}
			return nil
		})
	}
	const n = 3 * minPruned
	entries := 0
	for i := range n {
		pv := first.DeepCopy()
		pv.ObjectMeta = metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", first.Name, i)}
		pv, err := client.Create(t.Context(), pv, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		await(pv.Name, true)
		if i%2 == 0 {
			own.MarkDeleted(pv)
		} else { // the deletion has this version or a later one
			written := pv.DeepCopy()
			version, _ := strconv.Atoi(pv.ResourceVersion) // versions of the API server are numbers
			written.ResourceVersion = strconv.Itoa(version + 1)
			own.Observe(written)
		}
		if err := client.Delete(t.Context(), pv.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err = PatchMetadata(t.Context(), client, pv, MetadataPatch{RemoveFinalizers: pv.Finalizers}); err != nil {
			t.Fatal(err)
		}
		await(pv.Name, false)
		entries = max(entries, len(own.written)+len(own.deleted))
	}
	if entries == 0 || entries > minPruned {
		t.Errorf("%d entries after %d objects, want 1 to %d", entries, n, minPruned)
	}
}

func TestSyncedNamesForbiddenResources(t *testing.T) {
	c := kubetest.Get(t, kubetest.WithAudit())
	client, err := kubernetes.NewForConfig(c.UserConfig(t, "no-permissions"))
	if err != nil {
		t.Fatal(err)
	}
	informers := informersFor(t, c, client)
	informers.Volumes()
	informers.For("attacher").Attachments()
	optional := informers.For("resizer")
	optional.IfAllowed().Attachments()
	ctx, stop := context.WithCancel(t.Context())
	informers.Start(ctx)
	defer informers.Shutdown()
	defer stop()
	kubetest.Eventually(t, "the error names the resource", func(context.Context) error {
		err := informers.Synced()
		if err == nil || !strings.Contains(err.Error(), "persistentvolumes") || !strings.Contains(err.Error(), "forbidden") {
			return fmt.Errorf("it says %v", err)
		}
		if optional.Forbidden()["volumeattachments"] == nil || informers.Forbidden()["volumeattachments"] != nil {
			return errors.New("the resource is not missing for the role alone that does not require it")
		}
		return nil
	})
}

func TestIndexes(t *testing.T) {
	i := &Informers{factories: &factories{driver: driver}}
	claim := func(change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
		pvc := &corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: ptr.To("c")}}
		pvc.Annotations = map[string]string{storagehelpers.AnnStorageProvisioner: driver}
		change(pvc)
		return pvc
	}
	for name, tt := range map[string]struct {
		claim *corev1.PersistentVolumeClaim
		want  bool
	}{
		"waits":             {claim(func(*corev1.PersistentVolumeClaim) {}), true},
		"bound":             {claim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "v" }), false},
		"of another driver": {claim(func(c *corev1.PersistentVolumeClaim) { c.Annotations = nil }), false},
		"migrated to ours": {claim(func(c *corev1.PersistentVolumeClaim) {
			c.Annotations = map[string]string{storagehelpers.AnnMigratedTo: driver}
		}), true},
	} {
		if got := i.isPending(tt.claim); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestDependencyIndex: a claim that copies its source is found by it until the request has a result.
func TestDependencyIndex(t *testing.T) {
	c := kubetest.Get(t)
	i := informersFor(t, c, c.Client())
	index := i.Claims().informer.GetIndexer()
	for name, tt := range map[string]struct {
		volume     string
		finalizers []string
		want       int
	}{"waits": {"", nil, 1}, "bound": {"v", nil, 0}, "bound and protected": {"v", []string{ProvisioningFinalizer}, 1}} {
		pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "copy", Finalizers: tt.finalizers},
			Spec: corev1.PersistentVolumeClaimSpec{VolumeName: tt.volume,
				DataSource: &corev1.TypedLocalObjectReference{Kind: KindClaim, Name: "source"}}}
		if err := index.Add(pvc); err != nil {
			t.Fatal(err)
		}
		if got, err := index.ByIndex(ByDependency, DependencyKey(KindClaim, "ns", "source")); err != nil || len(got) != tt.want {
			t.Errorf("%s: %d claims, want %d: %v", name, len(got), tt.want, err)
		}
		_ = index.Delete(pvc)
	}
}

// FuzzMetadataPatch checks that no finalizer of another owner is lost, and none is doubled.
func FuzzMetadataPatch(f *testing.F) {
	f.Add("a,b,b", "c", "b")
	f.Fuzz(func(t *testing.T, have, add, remove string) {
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{UID: "u", Finalizers: strings.Split(have, ",")}}
		change := MetadataPatch{AddFinalizers: []string{add}, RemoveFinalizers: []string{remove}}
		patch, err := change.JSONPatch(pv)
		if err != nil || patch != nil && !json.Valid(patch) {
			t.Fatalf("%v: %s", err, patch)
		}
		before := pv.DeepCopy()
		change.Apply(pv)
		after := fmt.Sprint(pv.Finalizers)
		for _, finalizer := range before.Finalizers {
			if finalizer != remove && !strings.Contains(after, finalizer) {
				t.Errorf("%q is lost from %v", finalizer, pv.Finalizers)
			}
		}
		change.Apply(pv)
		if add != remove && fmt.Sprint(pv.Finalizers) != after {
			t.Errorf("applied twice: %v and %v", after, pv.Finalizers)
		}
	})
}

func TestIsGone(t *testing.T) {
	resource := schema.GroupResource{Resource: "persistentvolumes"}
	for name, tt := range map[string]struct {
		err  error
		want bool
	}{
		"no error":             {nil, false},
		"the API server":       {apierrors.NewNotFound(resource, "pv"), true},
		"the API server, told": {fmt.Errorf("reading it: %w", apierrors.NewNotFound(resource, "pv")), true},
		"a proxy":              {apierrors.NewGenericServerResponse(http.StatusNotFound, "get", resource, "pv", "<html>", 0, true), false},
		"something else":       {apierrors.NewConflict(resource, "pv", nil), false},
	} {
		if got := IsNotFound(tt.err); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
