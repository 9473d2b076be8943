package explain

import (
	"errors"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/provisioner"
)

// aboutSource is whether what the data of a claim comes from can be used, by the rules of
// the provisioner itself.
func (f *facts) aboutSource() findings {
	var l findings
	if err := f.sourceErr; err != nil {
		severity, next := Blocked, ownerOf+" deletes it and makes it anew with another data source."
		if errors.Is(err, provisioner.ErrPopulator) {
			severity, next = Waiting, "The populator of that kind provides the volume; "+lower(admin)+" looks whether it is installed."
		}
		l.add(severity, "source", next, "%s", sentence(upper(err.Error())))
		return l
	}
	s := f.source
	if s == nil {
		return l
	}
	if s.Namespace != f.claim.value.Namespace {
		f.aboutGrant(&l, s)
	}
	if s.Kind == kube.KindSnapshot {
		f.aboutSnapshot(&l, s)
	} else {
		f.aboutClone(&l, s)
	}
	return l
}

func (f *facts) aboutGrant(l *findings, s *sourceFact) {
	switch claim := f.claim.value; {
	case s.grants.why != "":
		l.add(Unknown, "source", "", "Whether a ReferenceGrant in namespace %q allows the claim to use %v is %s.", s.Namespace, s.Source, s.grants.why)
	case provisioner.Granted(s.grants.value, claim.Namespace, s.Source):
		l.add(Fine, "source", "", "A ReferenceGrant in namespace %q allows the claim to use %v.", s.Namespace, s.Source)
	default:
		l.add(Blocked, "source", "Whoever owns namespace "+s.Namespace+" creates a ReferenceGrant there, from PersistentVolumeClaims of namespace "+claim.Namespace+" to the "+s.Kind+".",
			"No ReferenceGrant in namespace %q allows claims of namespace %q to use %v.", s.Namespace, claim.Namespace, s.Source)
	}
}

// again is what the provisioner does with a claim whose source is not ready.
const again = "The provisioner tries again by itself once the source is ready; "

func (f *facts) aboutSnapshot(l *findings, s *sourceFact) {
	if f.aboutReading(l, s, s.snapshot) {
		return
	}
	next := again + "whoever owns the snapshot looks at it with `kubectl -n " + s.Namespace + " describe volumesnapshot " + s.Name + "`."
	if _, err := provisioner.ContentOf(s.snapshot.value); err != nil {
		l.add(Failing, "source", next, "%v cannot be restored: %s", s.Source, sentence(err.Error()))
		return
	}
	switch {
	case s.content.why != "":
		l.add(Unknown, "source", "", "The VolumeSnapshotContent of %v: %s.", s.Source, s.content.why)
		return
	case s.content.absent():
		l.add(Failing, "source", next, "The VolumeSnapshotContent of %v does not exist.", s.Source)
		return
	}
	if err := provisioner.CheckSnapshot(f.driver, s.snapshot.value, s.content.value, f.claim.value); err != nil {
		l.add(Failing, "source", next, "%v cannot be restored: %s", s.Source, sentence(err.Error()))
		return
	}
	l.add(Fine, "source", "", "The volume is restored from %v, which is ready.", s.Source)
}

func (f *facts) aboutClone(l *findings, s *sourceFact) {
	if s.claim.why != "" {
		l.add(Unknown, "source", "", "%v: %s.", s.Source, s.claim.why)
		return
	}
	if s.claim.absent() {
		f.addNoSource(l, s)
		return
	}
	next := again + "whoever owns the source asks `storage-controller explain pvc -n " + s.Namespace + " " + s.Name + "`."
	if err := provisioner.CheckClone(f.driver, s.claim.value, s.volume.value, f.claim.value); err != nil {
		l.add(Failing, "source", next, "%v cannot be cloned: %s", s.Source, sentence(err.Error()))
		return
	}
	l.add(Fine, "source", "", "The volume is cloned from %v, which is ready.", s.Source)
}

// aboutReading tells of a source that is not there or cannot be read, if that is so.
func (f *facts) aboutReading(l *findings, s *sourceFact, object known[map[string]any]) bool {
	switch {
	case object.why != "":
		l.add(Unknown, "source", "", "%v: %s.", s.Source, object.why)
	case object.unserved:
		l.add(Blocked, "source", admin+" installs the snapshot controller and its kinds.", "The data source is %v, and this cluster has no such kind.", s.Source)
	case object.absent():
		f.addNoSource(l, s)
	default:
		return false
	}
	return true
}

func (f *facts) addNoSource(l *findings, s *sourceFact) {
	l.add(Blocked, "source", ownerOf+" creates the source, or deletes the claim and makes it anew without that.", "The data source %v does not exist.", s.Source)
}
