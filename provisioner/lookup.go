// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// resolvedRefs holds what was read from the API server of the objects that a claim references besides its class.
type resolvedRefs struct {
	source  *volumerules.Source      // nil: an empty volume
	content *csi.VolumeContentSource // of the request
	mutable map[string]string        // parameters of its VolumeAttributesClass
	object  metav1.Object            // the source
	// sourceBytes is the size of the source of a recorded clone that is larger than the claim. Zero: it is not.
	sourceBytes int64
	err         error // why the claim cannot be provisioned from them
}

// needsRefs reports whether the request for a claim depends on objects that are not cached.
func (d driver) needsRefs(claim *corev1.PersistentVolumeClaim) bool {
	return claim.Spec.DataSource != nil || claim.Spec.DataSourceRef != nil || d.attributesClass(claim) != ""
}

// attributesClass returns the name of the VolumeAttributesClass of a claim (KEP-3751), or "" if there
// is none or the feature gate is off.
func (d driver) attributesClass(claim *corev1.PersistentVolumeClaim) string {
	if name := claim.Spec.VolumeAttributesClassName; name != nil && d.VolumeAttributesClass {
		return *name
	}
	return ""
}

// readReferences reads the objects that a claim references from the API server. A stale cache must not
// decide about the content of a volume, and such claims are few.
func (c *Controller) readReferences(ctx context.Context, claim *corev1.PersistentVolumeClaim) *resolvedRefs {
	f := &resolvedRefs{}
	f.source, f.err = volumerules.SourceOf(claim, c.cfg.CrossNamespaceVolumeDataSource)
	if f.err != nil {
		return f
	}
	if f.source != nil {
		f.err = c.permitted(ctx, claim, *f.source) // of a recorded request, too: users can write a record
		if f.err == nil {
			f.err = c.readContent(ctx, claim, f)
		}
		if f.err != nil {
			f.err = fmt.Errorf("data source %s: %w", f.source, f.err)
			return f
		}
	}
	if name := c.driver.attributesClass(claim); name != "" {
		f.mutable, f.err = c.mutableParameters(ctx, name)
	}
	return f
}

func (c *Controller) mutableParameters(ctx context.Context, name string) (map[string]string, error) {
	class, err := c.deps.Client.StorageV1().VolumeAttributesClasses().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("VolumeAttributesClass %q: %w", name, err)
	}
	if class.DriverName != c.driver.name {
		return nil, fmt.Errorf("VolumeAttributesClass %q is for driver %q, not for %q", name, class.DriverName, c.driver.name)
	}
	return class.Parameters, nil
}

// readContent adds to f the content source of the request for its data source, and the UID of the data source.
func (c *Controller) readContent(ctx context.Context, claim *corev1.PersistentVolumeClaim, f *resolvedRefs) (err error) {
	key := *f.source
	if key.Kind == kube.KindSnapshot {
		f.content, f.object, err = c.snapshotContent(ctx, claim, key)
		return err
	}
	source, err := c.deps.Client.CoreV1().PersistentVolumeClaims(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	wanted, size := claim, capacityRange(source).RequiredBytes
	if hasRecord(claim) && size > capacityRange(claim).RequiredBytes { // the source may have been expanded since: see checkVolume
		wanted = claim.DeepCopy()
		wanted.Spec.Resources = source.Spec.Resources
		f.sourceBytes = size
	}
	if err := volumerules.CheckClone(source, wanted); err != nil {
		return err
	}
	pv, err := c.deps.Client.CoreV1().PersistentVolumes().Get(ctx, source.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	pv, err = c.driver.asCSI(pv)
	if err != nil {
		return err
	}
	f.object = source
	f.content, err = volumerules.CloneContent(c.driver.name, source, pv, claim)
	return err
}

func (c *Controller) snapshotContent(
	ctx context.Context, claim *corev1.PersistentVolumeClaim, key volumerules.Source,
) (*csi.VolumeContentSource, metav1.Object, error) {
	s, err := c.deps.Snapshots.VolumeSnapshots(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if err != nil {
		return nil, nil, err
	}
	name, err := volumerules.BoundContent(s)
	if err != nil {
		return nil, nil, err
	}
	content, err := c.deps.Snapshots.VolumeSnapshotContents().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, nil, err
	}
	source, err := volumerules.SnapshotContent(c.driver.name, s, content, claim, c.cfg.PreventVolumeModeConversion)
	if err == nil && s.Status.RestoreSize != nil && capacityRange(claim).RequiredBytes > s.Status.RestoreSize.Value() {
		klog.FromContext(ctx).V(1).Info("The claim requests more than the restore size of its snapshot",
			"volumeSnapshot", klog.KObj(s), "restoreSize", s.Status.RestoreSize)
	}
	return source, s, err
}

// permitted returns an error if a source in another namespace has no ReferenceGrant (KEP-3294).
func (c *Controller) permitted(ctx context.Context, claim *corev1.PersistentVolumeClaim, source volumerules.Source) error {
	if source.Namespace == claim.Namespace {
		return nil
	}
	// Grant has the few fields that are used here, without a dependency on the Gateway API.
	data, err := kube.Raw(c.deps.Client.Discovery().RESTClient().Get().
		AbsPath("/apis", referenceGrants.Group, referenceGrants.Version, "namespaces", source.Namespace, referenceGrants.Resource).
		SetHeader("Accept", "application/json").Do(ctx))
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("no ReferenceGrant in namespace %q allows claim %s/%s to use it: the kind is not installed in this cluster",
			source.Namespace, claim.Namespace, claim.Name)
	}
	if err != nil {
		return fmt.Errorf("reading the ReferenceGrants of namespace %q: %w", source.Namespace, err)
	}
	var list struct{ Items []volumerules.Grant }
	if err := json.Unmarshal(data, &list); err != nil {
		return fmt.Errorf("reading the ReferenceGrants of namespace %q: %w", source.Namespace, err)
	}
	for _, g := range list.Items {
		if g.Allows(claim.Namespace, source) {
			return nil
		}
	}
	return fmt.Errorf("no ReferenceGrant in namespace %q allows claim %s/%s to use it", source.Namespace, claim.Namespace, claim.Name)
}
