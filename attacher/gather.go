package attacher

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// attachmentKey names one attachment. Another one of the same name has another
// UID: it starts with a fresh back-off.
type attachmentKey struct {
	Name string
	UID  types.UID
}

// String is for logs and pages.
func (k attachmentKey) String() string { return k.Name }

func keyOf(va *storagev1.VolumeAttachment) attachmentKey { return attachmentKey{va.Name, va.UID} }

// snapshot is everything that decide may look at.
type snapshot struct {
	attachment *storagev1.VolumeAttachment // nil: gone
	volume     *corev1.PersistentVolume    // nil: the attachment names none, or it is gone
	node       *storagev1.CSINode          // nil: gone
	// secrets is what was read in this sync; secretsRead tells whether it was.
	secrets     map[string]string
	secretsRead bool
	// forced tells that the driver has reported something else than what the status says.
	forced bool
	// unconfirmed tells that nobody but the cache, which may be old, has said since this
	// term began that the attachment is there.
	unconfirmed bool
	now         time.Time
}

// gather reads the caches, and the own writes that they have not seen yet.
func (t *term) gather(key attachmentKey, secrets map[string]string, secretsRead bool) snapshot {
	s := snapshot{secrets: secrets, secretsRead: secretsRead, now: time.Now()}
	va, ok := t.attachments.Get(key.Name)
	if !ok || va.UID != key.UID {
		return s
	}
	s.attachment, s.forced, s.unconfirmed = va, t.marks.has(key.UID), true
	if name := va.Spec.Source.PersistentVolumeName; name != nil {
		s.volume, _ = t.volumes.Get(*name)
	}
	if t.c.driver.publishes {
		s.node, _ = t.c.nodes.Get(va.Spec.NodeName)
	}
	return s
}

// nodeID is how the driver calls the node of the attachment. Only a detach may
// fall back on what was noted when it was attached.
func (d driver) nodeID(s snapshot, detach bool) (string, error) {
	if entry := kube.DriverOnNode(s.node, d.name); entry != nil {
		return entry.NodeID, nil
	}
	if noted := s.attachment.Annotations[annNodeID]; detach && noted != "" {
		return noted, nil
	}
	if s.node == nil {
		return "", fmt.Errorf("csinode.storage.k8s.io %q not found", s.attachment.Spec.NodeName)
	}
	return "", fmt.Errorf("CSINode %s does not contain driver %s", s.node.Name, d.name)
}

// detachSource is what to unpublish: as for an attach, or from the notes on the
// attachment when its volume has gone, or another one has its name.
func (d driver) detachSource(s snapshot) (source, error) {
	src, err := d.resolve(s.attachment, s.volume)
	noted := s.attachment.Annotations[annVolumeHandle]
	if s.attachment.Spec.Source.PersistentVolumeName == nil || noted == "" || err == nil && src.handle == noted {
		return src, err
	}
	src = source{handle: noted, migrated: s.attachment.Annotations[annMigrated] == "true"}
	if namespace, name, ok := strings.Cut(s.attachment.Annotations[annSecret], "/"); ok {
		src.secrets = &corev1.SecretReference{Namespace: namespace, Name: name}
	}
	return src, nil
}

// notes is what is kept on an attachment for its detach.
func notes(src source, nodeID string) kube.MetadataPatch {
	change := kube.MetadataPatch{SetAnnotations: map[string]string{annNodeID: nodeID, annVolumeHandle: src.handle}}
	if src.secrets != nil {
		change.SetAnnotations[annSecret] = src.secrets.Namespace + "/" + src.secrets.Name
	} else {
		change.RemoveAnnotations = append(change.RemoveAnnotations, annSecret)
	}
	if src.migrated {
		change.SetAnnotations[annMigrated] = "true"
	} else {
		change.RemoveAnnotations = append(change.RemoveAnnotations, annMigrated)
	}
	return change
}
