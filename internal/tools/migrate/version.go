// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// release is the version that the tag of an image names.
type release struct {
	major, minor int
	suffix       string // after the version, such as -eksbuild.4
}

var versionTag = regexp.MustCompile(`:v?([0-9]+)(?:\.([0-9]+))?(?:\.[0-9]+)?([^/:]*)$`)

// release returns the version of the image, and false if it names none.
func (s *source) release() (release, bool) {
	image, _, _ := strings.Cut(text(get(s.node, "image")), "@") // without the digest
	m := versionTag.FindStringSubmatch(image)
	ofDriver := s.kind != topolvm && !strings.Contains(ImageName(image), strings.TrimPrefix(string(s.kind), "csi-"))
	ofOpenShift := strings.HasPrefix(ImageName(image), "ose-") || strings.HasPrefix(ImageName(image), "origin-")
	if m == nil || ofDriver || ofOpenShift {
		return release{}, false
	}
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	return release{major, minor, m[3]}, true
}

func (r release) before(major, minor int) bool {
	return r.major < major || r.major == major && r.minor < minor
}

// whyPatched returns the reason why s may not be the program of the Kubernetes project, "" if nothing suggests it.
func (m *migration) whyPatched(s *source) string {
	if v, _ := s.release(); v.suffix != "" && !strings.HasPrefix(v.suffix, "-rc") && !m.Patched {
		return fmt.Sprintf("the suffix %s of its image shows that it is a patched %s. Find out what the patch does; if storage-controller "+
			"can do without, migrate with --replace-patched", v.suffix, s.kind)
	}
	if s.kind == livenessprobe {
		return ""
	}
	var unknown []string
	for _, f := range s.flags {
		_, known := m.Tables.flag(commands[s.kind], s.renamed(f.name))
		if _, removed := removedFlags[f.name]; !known && !removed && f.name != groupSnapshots {
			unknown = append(unknown, "--"+f.name)
		}
	}
	if len(unknown) == 0 {
		return ""
	}
	return fmt.Sprintf("%s has no flag %s, so that this is another program, or a patched one. Remove the flags if they have no effect, "+
		"and migrate again", s.kind, enumerate(unknown))
}

// noteSnapshotVersion notes that s used an older version of the snapshot API.
func noteSnapshotVersion(s *source, g *group, known bool) {
	const text = "%s used version v1beta1 of the snapshot API, storage-controller uses v1. Before %s, install the CRDs and the " +
		"snapshot-controller of external-snapshotter v4.0 or later, which serve both"
	switch v, _ := s.release(); {
	case !known:
	case s.kind == csiProvisioner && v.before(3, 0):
		g.changed(text, s.name, "volumes are restored from snapshots")
	case s.kind == csiSnapshotter && v.before(4, 0):
		g.must(text, s.name, "snapshots are created")
	}
}

// writeDefaults sets the flags whose default differs from the one of the sidecar's version.
func (s *source) writeDefaults(g *group) {
	v, known := s.release()
	noteSnapshotVersion(s, g, known)
	var defaults []setting
	add := func(applies bool, name, value string) {
		if _, set := s.lookup(name); applies && !set {
			defaults = append(defaults, newSetting(name, value))
		}
	}
	switch s.kind {
	case csiProvisioner:
		add(true, "timeout", "10s")
		add(g.serves(), "extra-create-metadata", "false")
		add(g.serves() && s.on(g.m.Tables, "enable-capacity"), "capacity-ownerref-level", "1")
		add(known && v.before(4, 0), "prevent-volume-mode-conversion", "false")
		add(known && v.before(2, 0), "default-fstype", "ext4")
		if known && v.before(5, 0) && !s.namesGate("Topology") {
			defaults = append(defaults, newSetting("feature-gates", "Topology=false"))
		}
		noteDefaults(s, g, known, "--feature-gates=Topology=true since v5, --prevent-volume-mode-conversion since v4, "+
			"--default-fstype unset since v2")
		if gateIsOff(s, "HonorPVReclaimPolicy", known && v.before(5, 1)) {
			g.changed("new PersistentVolumes get a finalizer, as with csi-provisioner v5.1 and later (HonorPVReclaimPolicy): " +
				"their reclaim policy also holds if they are deleted before their claim")
		}
		g.attributes = g.attributes || known && v.before(6, 0) && !s.namesGate(attributesClass)
	case csiAttacher:
		add(known && v.before(4, 0), "default-fstype", "ext4")
		noteDefaults(s, g, known, "--default-fstype unset since v4")
	case csiSnapshotter:
		if known && v.before(8, 7) && !s.namesGate(groupGate) {
			defaults = append(defaults, newSetting("feature-gates", groupGate+"=false"))
		}
		noteDefaults(s, g, known, "--feature-gates="+groupGate+"=true since v8.7")
	case csiResizer:
		_, resize := s.lookup("resize-timeout")
		_, modify := s.lookup("modify-timeout")
		if _, overrides := s.lookup("timeout"); overrides || !resize && !modify {
			add(true, "timeout", "10s")
		} else {
			add(true, "resize-timeout", "10s")
			add(true, "modify-timeout", "10s")
		}
		if gateIsOff(s, "RecoverVolumeExpansionFailure", known && v.before(1, 13)) {
			g.changed("after a failed expansion, a claim may request a smaller size, as with csi-resizer v1.13 and later " +
				"(RecoverVolumeExpansionFailure)")
		}
		if known && v.before(2, 3) && !s.namesGate("AnnotateFsResize") {
			g.info("during an expansion, PersistentVolumes have an annotation with the previous size, as with csi-resizer v2.3 and later " +
				"(AnnotateFsResize)")
		}
		g.attributes = g.attributes || known && v.before(2, 0) && !s.namesGate(attributesClass)
	}
	var written []string
	for _, f := range defaults {
		s.add(f)
		written = append(written, f.String())
	}
	if len(written) > 0 {
		g.info("written out, because the default of storage-controller differs from that of %s: %s", s.name, enumerate(written))
	}
}

// noteDefaults notes the defaults that apply if the version of s is unknown.
func noteDefaults(s *source, g *group, known bool, changed string) {
	if !known {
		note := g.must
		if s.isBundled() {
			note = g.info
		}
		note("the image of %s names no version: the defaults of the newest %s apply (%s). If it is older, set the old values",
			s.name, s.kind, changed)
	}
}

// gateIsOff reports whether s has a feature gate off: by a flag, or because it was off by default.
func gateIsOff(s *source, name string, byDefault bool) bool {
	if value, named := s.gate(name); named {
		return !isTrue(value)
	}
	return byDefault
}

// namesGate reports whether a flag of s sets a feature gate.
func (s *source) namesGate(name string) bool {
	_, named := s.gate(name)
	return named
}

// gate returns the value of a feature gate, and whether a flag of s sets it.
func (s *source) gate(name string) (value string, named bool) {
	for _, f := range s.flags {
		if f.name != "feature-gates" {
			continue
		}
		for item := range strings.SplitSeq(f.expanded, ",") {
			if gate, value, _ := strings.Cut(item, "="); strings.TrimSpace(gate) == name {
				return strings.TrimSpace(value), true // as in union, the first wins
			}
		}
	}
	return "", false
}
