// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"slices"
	"strings"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// explainDataSource reports whether the data source of a claim can be used, by the rules of the provisioner.
func explainDataSource(e *explanation) {
	if err := e.sourceErr; err != nil {
		text := sentence(strings.ToUpper(err.Error()[:1]) + err.Error()[1:])
		if errors.Is(err, volumerules.ErrPopulator) {
			e.waiting("source", "%s", text).SetNext("Verify that the volume populator of this kind is installed; it provides the volume.")
		} else {
			e.blocked("source", "%s", text).SetNext("Recreate the claim with another data source.")
		}
		return
	}
	s := e.source
	if s == nil {
		return
	}
	if s.Namespace != e.claim.Value.Namespace {
		explainGrant(e, s)
	}
	switch {
	case s.snapshot.Unserved:
		e.blocked("source", "Data source %v: the cluster does not serve this kind.", s.Source).
			SetNext("Install the snapshot CRDs and the snapshot controller.")
	case s.snapshot.Missing, s.claim.Missing:
		e.blocked("source", "Data source %v not found.", s.Source).SetNext("Create the data source, or recreate the claim without it.")
	case s.Kind == kube.KindSnapshot:
		explainSnapshot(e, s)
	case s.claim.Found:
		explainClone(e, s)
	}
}

func explainGrant(e *explanation, s *sourceFact) {
	claim := e.claim.Value
	allows := func(g *volumerules.Grant) bool { return g.Allows(claim.Namespace, s.Source) }
	switch {
	case slices.ContainsFunc(s.grants.Value, allows):
		e.ok("source", "A ReferenceGrant in namespace %q allows the claim to use %v.", s.Namespace, s.Source)
	case s.grants.Missing:
		e.blocked("source", "The cluster does not serve ReferenceGrants, which data sources in other namespaces need.").
			SetNext("Install the CRD of ReferenceGrants, or recreate the claim with a data source in its own namespace.")
	case s.grants.Found:
		e.blocked("source",
			"No ReferenceGrant in namespace %q allows claims of namespace %q to use %v.", s.Namespace, claim.Namespace, s.Source).SetNext(
			"Create a ReferenceGrant in namespace %q from PersistentVolumeClaims of namespace %q to the %s.", s.Namespace,
			claim.Namespace, s.Kind)
	}
}

func explainSnapshot(e *explanation, s *sourceFact) {
	const next = "Retries automatically. Check the snapshot: `kubectl -n %s describe volumesnapshot %s`."
	if !s.snapshot.Found {
		return
	}
	if s.content.Missing {
		e.failing("source", "VolumeSnapshotContent of %v not found.", s.Source).SetNext(next, s.Namespace, s.Name)
		return
	}
	check := func(mode bool) error {
		_, err := volumerules.SnapshotContent(e.driver, s.snapshot.Value, s.content.Value, e.claim.Value, mode)
		return err
	}
	_, err := volumerules.BoundContent(s.snapshot.Value)
	if err == nil && s.content.Found {
		err = check(false)
	}
	if err != nil {
		e.failing("source", "%v cannot be restored: %s", s.Source, sentence(err.Error())).SetNext(next, s.Namespace, s.Name)
	} else if !s.content.Found {
		return
	} else if err := check(true); err != nil {
		e.failing("source", "%v is not restored unless the provisioner has --prevent-volume-mode-conversion=false: %s", s.Source,
			sentence(err.Error())).
			SetNext("Recreate the claim with the volume mode of the snapshot, or annotate its VolumeSnapshotContent with %s.",
				volumerules.AnnAllowModeChange)
	} else {
		e.ok("source", "%v is ready to be restored.", s.Source)
	}
}

func explainClone(e *explanation, s *sourceFact) {
	source, claim := s.claim.Value, e.claim.Value
	err := volumerules.CheckClone(source, claim)
	if err == nil && s.volume.Found {
		_, err = volumerules.CloneContent(e.driver, source, s.volume.Value, claim)
	}
	if err != nil {
		e.failing("source", "%v cannot be cloned: %s", s.Source, sentence(err.Error())).
			SetNext("Retries automatically. Run `storage-controller explain pvc -n %s %s`.", s.Namespace, s.Name)
		return
	}
	e.ok("source", "%v is ready to be cloned.", s.Source)
}
