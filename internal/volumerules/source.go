// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package volumerules

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// SnapshotGroup is the API group of VolumeSnapshots.
const SnapshotGroup = "snapshot.storage.k8s.io"

// Source names the data source of a claim. Kind is kube.KindSnapshot or kube.KindClaim.
type Source struct{ Kind, Namespace, Name string }

func (s Source) String() string { return fmt.Sprintf("%s %s/%s", s.Kind, s.Namespace, s.Name) }

// DependencyKey returns the key under which claims wait for s.
func (s Source) DependencyKey() string { return kube.DependencyKey(s.Kind, s.Namespace, s.Name) }

// ErrPopulator means that a volume populator provides the data of a claim, and not the driver.
var ErrPopulator = errors.New("an external populator is expected to provide its data")

// SourceOf returns the data source of a claim, or nil for an empty volume. It returns
// ErrPopulator for kinds that CSI drivers do not copy (KEP-1495). crossNamespace permits a
// source in another namespace (KEP-3294).
func SourceOf(claim *corev1.PersistentVolumeClaim, crossNamespace bool) (*Source, error) {
	group := ""
	source := Source{Namespace: claim.Namespace}
	switch s, ref := claim.Spec.DataSource, claim.Spec.DataSourceRef; {
	case s != nil:
		group, source.Kind, source.Name = ptr.Deref(s.APIGroup, ""), s.Kind, s.Name
	case ref != nil:
		group, source.Kind, source.Name = ptr.Deref(ref.APIGroup, ""), ref.Kind, ref.Name
		if namespace := ptr.Deref(ref.Namespace, ""); namespace != "" {
			if !crossNamespace {
				return nil, errors.New(
					"spec.dataSourceRef.namespace: needs the feature gate CrossNamespaceVolumeDataSource of the provisioner",
				)
			}
			source.Namespace = namespace
		}
	default:
		return nil, nil
	}
	switch {
	case source.Name == "":
		return nil, fmt.Errorf("the data source of kind %s has no name", source.Kind)
	case source.Kind == kube.KindSnapshot && group != SnapshotGroup:
		return nil, fmt.Errorf("data source %s: its API group is %q and must be %q", source, group, SnapshotGroup)
	case source.Kind != kube.KindSnapshot && (source.Kind != kube.KindClaim || group != ""):
		return nil, fmt.Errorf("data source %s of API group %q: %w", source, group, ErrPopulator)
	}
	return &source, nil
}

// Grant is a ReferenceGrant (gateway.networking.k8s.io/v1beta1), with the fields that are used here.
type Grant struct {
	Spec struct {
		From []struct {
			Group     string `json:"group"`
			Kind      string `json:"kind"`
			Namespace string `json:"namespace"`
		} `json:"from"`
		To []struct {
			Group string  `json:"group"`
			Kind  string  `json:"kind"`
			Name  *string `json:"name"` // nil or "": any
		} `json:"to"`
	} `json:"spec"`
}

// Allows reports whether a grant in the namespace of source permits claims of namespace to use source.
func (g Grant) Allows(namespace string, source Source) bool {
	group := ""
	if source.Kind == kube.KindSnapshot {
		group = SnapshotGroup
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
