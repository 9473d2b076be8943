package provisioner

import (
	"encoding/json"
	"fmt"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// What follows lets others tell people what the controller will say of objects, in its
// own words and by its own rules, without a controller.

// NamedSecret is a secret that a class or a volume names.
type NamedSecret struct {
	Purpose         string // such as provisioner-secret-name, as class parameters spell it
	Namespace, Name string
}

// SecretsOf is the secrets that the parameters of a class name for a claim whose volume
// is called volume. The error is what is wrong with the parameters.
func SecretsOf(parameters map[string]string, volume string, claim *corev1.PersistentVolumeClaim) ([]NamedSecret, error) {
	refs, err := secretsOf(parameters, secretScope{volume: volume, claim: claim.Name, namespace: claim.Namespace, annotations: claim.Annotations})
	var named []NamedSecret
	for _, s := range []struct {
		kind secretKind
		ref  *corev1.SecretReference
	}{
		{secretProvisioner, refs.Provisioner}, {secretControllerPublish, refs.ControllerPublish}, {secretNodeStage, refs.NodeStage},
		{secretNodePublish, refs.NodePublish}, {secretControllerExpand, refs.ControllerExpand}, {secretNodeExpand, refs.NodeExpand},
		{secretControllerModify, refs.ControllerModify},
	} {
		if s.ref != nil {
			named = append(named, NamedSecret{s.kind.name, s.ref.Namespace, s.ref.Name})
		}
	}
	return named, err
}

// DeletionSecret is the secret with which the volume of pv is deleted; false for none.
func DeletionSecret(pv *corev1.PersistentVolume) (NamedSecret, bool) {
	s := NamedSecret{secretProvisioner.name, pv.Annotations[annDeletionSecretNamespace], pv.Annotations[annDeletionSecretName]}
	return s, s.Name != ""
}

// DefaultVolumeName is the name of the volume of a claim where no flag changes it.
func DefaultVolumeName(claim types.UID) string { return DefaultConfig().volumeName(claim) }

// Source is what the data of a claim comes from.
type Source struct{ Kind, Namespace, Name string }

func (s Source) String() string { return sourceKey(s).String() }

// ErrPopulator is that somebody else than the driver provides the data of a claim.
var ErrPopulator = errPopulator

// SourceOf is the source of the data of a claim; nil for an empty volume. The error says
// why the driver is not asked for it.
func SourceOf(claim *corev1.PersistentVolumeClaim) (*Source, error) {
	key, err := sourceOf(claim, true)
	return (*Source)(key), err
}

// ContentOf is the name of the VolumeSnapshotContent of a snapshot. The error says why the
// snapshot cannot be restored.
func ContentOf(snapshot map[string]any) (string, error) {
	var s snapshotv1.VolumeSnapshot
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(snapshot, &s); err != nil {
		return "", fmt.Errorf("it cannot be read: %w", err)
	}
	return checkSnapshot(&s)
}

// CheckSnapshot says why driver cannot make the volume of claim of a snapshot; nil when
// it can.
func CheckSnapshot(driverName string, snapshot, content map[string]any, claim *corev1.PersistentVolumeClaim) error {
	var s snapshotv1.VolumeSnapshot
	var c snapshotv1.VolumeSnapshotContent
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(snapshot, &s); err != nil {
		return fmt.Errorf("it cannot be read: %w", err)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(content, &c); err != nil {
		return fmt.Errorf("its VolumeSnapshotContent cannot be read: %w", err)
	}
	if _, err := checkSnapshot(&s); err != nil {
		return err
	}
	_, err := driver{name: driverName, Config: DefaultConfig()}.snapshotContent(&s, &c, claim)
	return err
}

// CheckClone says why driver cannot make the volume of claim of that of source, whose
// PersistentVolume is pv; nil when it can. Without pv only source is looked at.
func CheckClone(driverName string, source *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) error {
	if err := checkCloned(source, claim, false); err != nil || pv == nil {
		return err
	}
	_, err := driver{name: driverName}.clonedContent(source, pv, claim)
	return err
}

// Granted tells whether one of grants, the ReferenceGrants of the namespace of source,
// lets the claims of namespace use it.
func Granted(grants []map[string]any, namespace string, source Source) bool {
	for _, object := range grants {
		var g grant
		data, err := json.Marshal(object)
		if err == nil && json.Unmarshal(data, &g) == nil && g.allows(namespace, sourceKey(source)) {
			return true
		}
	}
	return false
}

// AskedDriver is the driver that was asked for the volume of a claim and has not given a
// final answer; "" when there is no note of that.
func AskedDriver(claim *corev1.PersistentVolumeClaim) string {
	var r requestRecord
	if json.Unmarshal([]byte(claim.Annotations[annRequest]), &r) != nil {
		return ""
	}
	return r.Driver
}
