package explain

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
	"github.com/storage-controller/storage-controller/provisioner"
)

// explainDataSource reports whether the data source of a claim can be used, by the rules of the provisioner.
func (e *explanation) explainDataSource() {
	if err := e.sourceErr; err != nil {
		text := sentence(strings.ToUpper(err.Error()[:1]) + err.Error()[1:])
		if errors.Is(err, volumerules.ErrPopulator) {
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
	case s.granted(claim.Namespace):
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
	_, err := boundContent(s.snapshot.value)
	if err == nil && s.content.found {
		err = e.checkSnapshot(s)
	}
	if err != nil {
		e.add(Failing, "source", "%v cannot be restored: %s", s.Source, sentence(err.Error())).next(next, s.Namespace, s.Name)
	} else if s.content.found {
		e.add(Fine, "source", "%v is ready to be restored.", s.Source)
	}
}

func (e *explanation) explainClone(s *sourceFact) {
	if err := e.checkClone(s); err != nil {
		e.add(Failing, "source", "%v cannot be cloned: %s", s.Source, sentence(err.Error())).
			next("Retries automatically. Run `storage-controller explain pvc -n %s %s`.", s.Namespace, s.Name)
		return
	}
	e.add(Fine, "source", "%v is ready to be cloned.", s.Source)
}

// decode converts an object that was read without its Go type.
func decode[T any](object map[string]any) (*T, error) {
	typed := new(T)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object, typed); err != nil {
		return nil, fmt.Errorf("it cannot be read: %w", err)
	}
	return typed, nil
}

// boundContent returns the name of the VolumeSnapshotContent of a VolumeSnapshot.
func boundContent(object map[string]any) (string, error) {
	snapshot, err := decode[snapshotv1.VolumeSnapshot](object)
	if err != nil {
		return "", err
	}
	return volumerules.BoundContent(snapshot)
}

func (e *explanation) checkSnapshot(s *sourceFact) error {
	snapshot, err := decode[snapshotv1.VolumeSnapshot](s.snapshot.value)
	if err != nil {
		return err
	}
	content, err := decode[snapshotv1.VolumeSnapshotContent](s.content.value)
	if err != nil {
		return err
	}
	_, err = volumerules.SnapshotContent(e.driver, snapshot, content, e.claim.value, provisioner.DefaultConfig().PreventVolumeModeConversion)
	return err
}

// checkClone checks only the source if its PersistentVolume was not read.
func (e *explanation) checkClone(s *sourceFact) error {
	source, pv, claim := s.claim.value, s.volume.value, e.claim.value
	if err := volumerules.CheckClone(source, claim, false); err != nil || pv == nil {
		return err
	}
	_, err := volumerules.CloneContent(e.driver, source, pv, claim)
	return err
}

// granted reports whether a ReferenceGrant permits claims of namespace to use the source.
func (s *sourceFact) granted(namespace string) bool {
	return slices.ContainsFunc(s.grants.value, func(object map[string]any) bool {
		grant, err := decode[volumerules.Grant](object)
		return err == nil && grant.Allows(namespace, s.Source)
	})
}
