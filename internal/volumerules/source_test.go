// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package volumerules

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// from returns a change that sets spec.dataSource.
func from(group *string, kind, name string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: group, Kind: kind, Name: name}
	}
}

func fromRef(group, namespace *string, kind, name string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: group, Namespace: namespace, Kind: kind, Name: name}
	}
}

func TestSourceOf(t *testing.T) {
	snapshots, claims := ptr.To(SnapshotGroup), ptr.To("")
	tests := map[string]struct {
		claim     func(*corev1.PersistentVolumeClaim)
		gate      bool
		want      *Source
		populator bool
		err       string
	}{
		"none":                      {},
		"snapshot":                  {claim: from(snapshots, "VolumeSnapshot", "s"), want: &Source{"VolumeSnapshot", "ns", "s"}},
		"snapshot by reference":     {claim: fromRef(snapshots, nil, "VolumeSnapshot", "s"), want: &Source{"VolumeSnapshot", "ns", "s"}},
		"snapshot without group":    {claim: from(nil, "VolumeSnapshot", "s"), err: `its API group is ""`},
		"snapshot of another group": {claim: from(ptr.To("x"), "VolumeSnapshot", "s"), err: `its API group is "x"`},
		"claim":                     {claim: from(nil, "PersistentVolumeClaim", "c"), want: &Source{"PersistentVolumeClaim", "ns", "c"}},
		"claim with the empty group": {
			claim: from(claims, "PersistentVolumeClaim", "c"), want: &Source{"PersistentVolumeClaim", "ns", "c"},
		},
		"claim of another group": {claim: from(ptr.To("x"), "PersistentVolumeClaim", "c"), populator: true},
		"another kind":           {claim: from(ptr.To("x"), "Hello", "h"), populator: true},
		"no name":                {claim: from(nil, "PersistentVolumeClaim", ""), err: "no name"},
		"empty namespace": {
			claim: fromRef(nil, ptr.To(""), "PersistentVolumeClaim", "c"), want: &Source{"PersistentVolumeClaim", "ns", "c"},
		},
		"namespace without the gate": {
			claim: fromRef(nil, ptr.To("b"), "PersistentVolumeClaim", "c"), err: "CrossNamespaceVolumeDataSource",
		},
		"own namespace, gate off": {
			claim: fromRef(nil, ptr.To("ns"), "PersistentVolumeClaim", "c"), err: "CrossNamespaceVolumeDataSource",
		},
		"another namespace": {
			gate: true, claim: fromRef(nil, ptr.To("b"), "PersistentVolumeClaim", "c"), want: &Source{"PersistentVolumeClaim", "b", "c"},
		},
		"snapshot elsewhere": {
			gate: true, claim: fromRef(snapshots, ptr.To("b"), "VolumeSnapshot", "s"), want: &Source{"VolumeSnapshot", "b", "s"},
		},
		"populator elsewhere, no way": {claim: fromRef(ptr.To("x"), ptr.To("b"), "Hello", "h"), err: "CrossNamespaceVolumeDataSource"},
		"both fields, the older one wins": {gate: true, claim: func(c *corev1.PersistentVolumeClaim) {
			from(nil, "PersistentVolumeClaim", "c")(c)
			fromRef(nil, ptr.To("b"), "PersistentVolumeClaim", "other")(c)
		}, want: &Source{"PersistentVolumeClaim", "ns", "c"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := SourceOf(testClaim(tt.claim), tt.gate)
			if (err != nil) != (tt.err != "" || tt.populator) || errors.Is(err, ErrPopulator) != tt.populator || err != nil &&
				!strings.Contains(err.Error(), tt.err) {
				t.Errorf("error %v, want %q, populator %t", err, tt.err, tt.populator)
			}
			if (got == nil) != (tt.want == nil) || got != nil && *got != *tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// FuzzSourceOf: a claim that names a source never gets an empty volume, nor one of another
// namespace without the gate, and what we copy is of one of our two kinds.
func FuzzSourceOf(f *testing.F) {
	f.Add(true, true, SnapshotGroup, "VolumeSnapshot", "s", "")
	f.Add(false, false, "", "PersistentVolumeClaim", "c", "b")
	f.Fuzz(func(t *testing.T, gate, local bool, group, kind, name, namespace string) {
		change := fromRef(&group, &namespace, kind, name)
		if local {
			change = from(&group, kind, name)
		}
		got, err := SourceOf(testClaim(change), gate)
		switch {
		case (got == nil) != (err != nil):
			t.Errorf("source %v, error %v", got, err)
		case err != nil:
		case got.Name == "" || got.Namespace != "ns" && (!gate || local):
			t.Errorf("source %v", got)
		case got.Kind == kube.KindSnapshot && group == SnapshotGroup, got.Kind == kube.KindClaim && group == "":
		default:
			t.Errorf("source %v of group %q", got, group)
		}
	})
}

func TestGrantAllows(t *testing.T) {
	type (
		source = struct {
			Group     string `json:"group"`
			Kind      string `json:"kind"`
			Namespace string `json:"namespace"`
		}
		target = struct {
			Group string  `json:"group"`
			Kind  string  `json:"kind"`
			Name  *string `json:"name"`
		}
	)
	from, to := source{"", "PersistentVolumeClaim", "a"}, target{SnapshotGroup, "VolumeSnapshot", nil}
	tests := map[string]struct {
		from []source
		to   []target
		want bool
	}{
		"matches":                {[]source{from}, []target{to}, true},
		"one of several":         {[]source{{"x", "Y", "z"}, from}, []target{{"x", "Y", nil}, to}, true},
		"empty name":             {[]source{from}, []target{{to.Group, to.Kind, ptr.To("")}}, true},
		"its name":               {[]source{from}, []target{{to.Group, to.Kind, ptr.To("s")}}, true},
		"another name":           {[]source{from}, []target{{to.Group, to.Kind, ptr.To("other")}}, false},
		"from another namespace": {[]source{{from.Group, from.Kind, "b"}}, []target{to}, false},
		"from another kind":      {[]source{{from.Group, "Pod", from.Namespace}}, []target{to}, false},
		"from another group":     {[]source{{"x", from.Kind, from.Namespace}}, []target{to}, false},
		"to another kind":        {[]source{from}, []target{{to.Group, "PersistentVolumeClaim", nil}}, false},
		"to another group":       {[]source{from}, []target{{"", to.Kind, nil}}, false},
		"from nothing":           {nil, []target{to}, false},
		"to nothing":             {[]source{from}, nil, false},
		"nothing":                {nil, nil, false},
		"two halves of different use": {
			[]source{{"", "PersistentVolumeClaim", "b"}, {"x", "PersistentVolumeClaim", "a"}}, []target{to}, false,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var g Grant
			g.Spec.From, g.Spec.To = tt.from, tt.to
			if got := g.Allows("a", Source{"VolumeSnapshot", "b", "s"}); got != tt.want {
				t.Errorf("got %t", got)
			}
		})
	}
	var g Grant
	g.Spec.From, g.Spec.To = []source{from}, []target{{"", "PersistentVolumeClaim", nil}}
	if !g.Allows("a", Source{"PersistentVolumeClaim", "b", "c"}) {
		t.Error("a claim is not allowed")
	}
}
