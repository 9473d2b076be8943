package audit

import (
	"cmp"
	"slices"
)

// Kind is what is wrong; also the label of the metric.
type Kind string

// The kinds of findings.
const (
	VolumeWithoutPV      Kind = "volume_without_pv"      // listed by the driver, and no PersistentVolume has its handle
	PVWithoutVolume      Kind = "pv_without_volume"      // a PersistentVolume whose handle the driver does not list
	AttachedNotPublished Kind = "attached_not_published" // attached by its status, and not published by the driver
	PublishedNotAttached Kind = "published_not_attached" // published by the driver, and there is no attachment
	Stuck                Kind = "stuck"                  // being deleted for long
)

// Kinds is all kinds, in the order of reports.
func Kinds() []Kind {
	return []Kind{VolumeWithoutPV, PVWithoutVolume, AttachedNotPublished, PublishedNotAttached, Stuck}
}

// Finding is one thing that is wrong.
type Finding struct {
	Kind Kind `json:"kind"`
	// Object is kind and name of the object, if there is one.
	Object       string `json:"object,omitempty"`
	UID          string `json:"uid,omitempty"`
	VolumeHandle string `json:"volumeHandle,omitempty"`
	Node         string `json:"node,omitempty"` // as the driver calls it
	Message      string `json:"message"`
	// Finalizers hold the object, for [Stuck].
	Finalizers []Finalizer `json:"finalizers,omitempty"`
}

// Finalizer is what keeps an object, and who takes it away.
type Finalizer struct {
	Name    string `json:"name"`
	Remover string `json:"remover"`
}

// identity is by what a finding is the same in two looks.
type identity struct {
	kind                      Kind
	object, uid, handle, node string
}

func (f Finding) identity() identity {
	return identity{f.Kind, f.Object, f.UID, f.VolumeHandle, f.Node}
}

// both is those of now that were there before. What is under way differs from one look to
// the next: a volume that was just made has no PersistentVolume yet. What is stuck is so by
// its age already.
func both(before, now []Finding) []Finding {
	seen := map[identity]bool{}
	for _, f := range before {
		seen[f.identity()] = true
	}
	return slices.DeleteFunc(slices.Clone(now), func(f Finding) bool { return f.Kind != Stuck && !seen[f.identity()] })
}

func sorted(findings []Finding) []Finding {
	order := map[Kind]int{}
	for i, k := range Kinds() {
		order[k] = i
	}
	slices.SortFunc(findings, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(order[a.Kind], order[b.Kind]), cmp.Compare(a.Object, b.Object), cmp.Compare(a.VolumeHandle, b.VolumeHandle), cmp.Compare(a.Node, b.Node))
	})
	return findings
}
