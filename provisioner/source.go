package provisioner

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

const snapshotGroup = "snapshot.storage.k8s.io"

// sourceKey names what the data of a claim comes from; Kind is one of
// kube.KindSnapshot and kube.KindClaim.
type sourceKey struct{ Kind, Namespace, Name string }

func (k sourceKey) String() string { return fmt.Sprintf("%s %s/%s", k.Kind, k.Namespace, k.Name) }

func (k sourceKey) need() string { return kube.DependencyKey(k.Kind, k.Namespace, k.Name) }

// errPopulator is the source of a claim that somebody else fills.
var errPopulator = errors.New("an external populator is expected to provide its data")

// sourceOf is the source of the data of a claim; nil for an empty volume. It wraps
// errPopulator for kinds that are none of ours (KEP-1495).
func sourceOf(claim *corev1.PersistentVolumeClaim, crossNamespace bool) (*sourceKey, error) {
	var group *string
	key := sourceKey{Namespace: claim.Namespace}
	switch s, ref := claim.Spec.DataSource, claim.Spec.DataSourceRef; {
	case s != nil:
		group, key.Kind, key.Name = s.APIGroup, s.Kind, s.Name
	case ref != nil:
		group, key.Kind, key.Name = ref.APIGroup, ref.Kind, ref.Name
		if ref.Namespace != nil && *ref.Namespace != "" {
			if !crossNamespace {
				return nil, errors.New("spec.dataSourceRef.namespace: needs the feature gate CrossNamespaceVolumeDataSource of the provisioner")
			}
			key.Namespace = *ref.Namespace
		}
	default:
		return nil, nil
	}
	g := ""
	if group != nil {
		g = *group
	}
	switch {
	case key.Name == "":
		return nil, fmt.Errorf("the data source of kind %s has no name", key.Kind)
	case key.Kind == kube.KindSnapshot && g != snapshotGroup:
		return nil, fmt.Errorf("data source %s: its API group is %q and has to be %q", key, g, snapshotGroup)
	case key.Kind != kube.KindSnapshot && (key.Kind != kube.KindClaim || g != ""):
		return nil, fmt.Errorf("data source %s of API group %q: %w", key, g, errPopulator)
	}
	return &key, nil
}

// grant is the part of a ReferenceGrant (gateway.networking.k8s.io/v1beta1) that counts.
type grant struct {
	Spec struct {
		From []struct {
			Group, Kind, Namespace string
		}
		To []struct {
			Group, Kind string
			Name        *string // nil or "": any
		}
	}
}

// allows tells whether a grant in the namespace of source lets the claims of namespace use it.
func (g grant) allows(namespace string, source sourceKey) bool {
	group := ""
	if source.Kind == kube.KindSnapshot {
		group = snapshotGroup
	}
	from, to := false, false
	for _, f := range g.Spec.From {
		from = from || f.Group == "" && f.Kind == kube.KindClaim && f.Namespace == namespace
	}
	for _, t := range g.Spec.To {
		to = to || t.Group == group && t.Kind == source.Kind && (t.Name == nil || *t.Name == "" || *t.Name == source.Name)
	}
	return from && to
}
