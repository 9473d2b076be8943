package explain

import (
	"errors"
	"strings"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/provisioner"
)

// explainDataSource reports whether the data source of a claim can be used, by the rules of the provisioner.
func (e *explanation) explainDataSource() {
	if err := e.sourceErr; err != nil {
		text := sentence(strings.ToUpper(err.Error()[:1]) + err.Error()[1:])
		if errors.Is(err, provisioner.ErrPopulator) {
			e.add(Waiting, "source", "%s", text).next("Verify that the volume populator of this kind is installed; it provides the volume.")
		} else {
			e.add(Blocked, "source", "%s", text).next("Recreate the claim with another data source.")
		}
		return
	}
	s := e.source
	if s == nil {
		return
	}
	if s.Namespace != e.claim.value.Namespace {
		e.explainGrant(s)
	}
	switch {
	case s.snapshot.unserved:
		e.add(Blocked, "source",
			"Data source %v: the cluster does not serve this kind.", s.Source).next("Install the snapshot CRDs and the snapshot controller.")
	case s.snapshot.missing, s.claim.missing:
		e.add(Blocked, "source", "Data source %v not found.", s.Source).next("Create the data source, or recreate the claim without it.")
	case s.Kind == kube.KindSnapshot:
		e.explainSnapshot(s)
	case s.claim.found:
		e.explainClone(s)
	}
}

func (e *explanation) explainGrant(s *sourceFact) {
	claim := e.claim.value
	switch {
	case provisioner.Granted(s.grants.value, claim.Namespace, s.Source):
		e.add(Fine, "source", "A ReferenceGrant in namespace %q allows the claim to use %v.", s.Namespace, s.Source)
	case s.grants.found || s.grants.missing:
		e.add(Blocked, "source",
			"No ReferenceGrant in namespace %q allows claims of namespace %q to use %v.", s.Namespace, claim.Namespace, s.Source).
			next(
				"Create a ReferenceGrant in namespace %q from PersistentVolumeClaims of namespace %q to the %s.", s.Namespace, claim.Namespace, s.Kind)
	}
}

func (e *explanation) explainSnapshot(s *sourceFact) {
	const next = "Retries automatically. Check the snapshot: `kubectl -n %s describe volumesnapshot %s`."
	if !s.snapshot.found {
		return
	}
	if s.content.missing {
		e.add(Failing, "source", "VolumeSnapshotContent of %v not found.", s.Source).next(next, s.Namespace, s.Name)
		return
	}
	_, err := provisioner.ContentOf(s.snapshot.value)
	if err == nil && s.content.found {
		err = provisioner.CheckSnapshot(e.driver, s.snapshot.value, s.content.value, e.claim.value)
	}
	if err != nil {
		e.add(Failing, "source", "%v cannot be restored: %s", s.Source, sentence(err.Error())).next(next, s.Namespace, s.Name)
	} else if s.content.found {
		e.add(Fine, "source", "%v is ready to be restored.", s.Source)
	}
}

func (e *explanation) explainClone(s *sourceFact) {
	if err := provisioner.CheckClone(e.driver, s.claim.value, s.volume.value, e.claim.value); err != nil {
		e.add(Failing, "source", "%v cannot be cloned: %s", s.Source, sentence(err.Error())).
			next("Retries automatically. Run `storage-controller explain pvc -n %s %s`.", s.Namespace, s.Name)
		return
	}
	e.add(Fine, "source", "%v is ready to be cloned.", s.Source)
}
