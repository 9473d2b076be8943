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
	suffix       string // after the version, such as _vmware.1
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

// rebuild is an image that a vendor builds from the sources of the release, apart from newer dependencies.
type rebuild struct {
	suffix *regexp.Regexp
	// variable has no effect here, because of why. Optional.
	variable, why string
}

var rebuilds = []rebuild{
	// The images of the drivers for Amazon EBS, EFS and FSx, since 2025: https://github.com/aws/csi-components. Its directory patches
	// has newer dependencies and, for csi-provisioner v6 and csi-resizer v2, the API of Kubernetes before 1.34.
	{regexp.MustCompile(`^-eksbuild\.[0-9]+$`), "ENABLE_VAC_FALLBACK",
		"VolumeAttributesClasses are read with version v1 of their API, which Kubernetes serves since 1.34"},
	// Amazon EKS Distro: https://github.com/aws/eks-distro/tree/main/projects/kubernetes-csi. All patches are newer dependencies.
	{regexp.MustCompile(`^-eks-[0-9]+-[0-9]+-[0-9]+$`), "", ""},
}

// rebuild returns the item of rebuilds with the suffix of the image of s, nil for none.
func (s *source) rebuild() *rebuild {
	v, _ := s.release()
	for i := range rebuilds {
		if rebuilds[i].suffix.MatchString(v.suffix) {
			return &rebuilds[i]
		}
	}
	return nil
}

// isPatched reports whether the suffix of the image of s is that of a patched program.
func (s *source) isPatched() bool {
	v, _ := s.release()
	return v.suffix != "" && !strings.HasPrefix(v.suffix, "-rc") && s.rebuild() == nil
}

// whyPatched returns the reason why s may not be the program of the Kubernetes project, "" if nothing suggests it. flags are those
// that the program does not have.
func (m *migration) whyPatched(s *source, flags []string) string {
	const consequence = "so that this is another program, or a patched one. Remove %s if %s, and migrate again"
	v, _ := s.release()
	gates := s.unknownGates(m.Tables)
	switch {
	case s.isPatched() && !m.Patched:
		return fmt.Sprintf("the suffix %s of its image shows that it is a patched %s. Find out what the patch does; if storage-controller "+
			"can do without, migrate with --replace-patched", v.suffix, s.kind)
	case len(flags) > 0:
		return fmt.Sprintf("%s has no flag %s, "+consequence, s.kind, enumerate(flags), "the flags", "they have no effect")
	case len(gates) > 0:
		return fmt.Sprintf("%s has no feature gate %s, "+consequence, s.kind, enumerate(gates), "the gates", "they have no effect")
	}
	return ""
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

// attributesClass is the feature gate that csi-provisioner and csi-resizer both have.
const attributesClass = "VolumeAttributesClass"

// writeDefaults appends the flags whose default differs from the one of the sidecar's version to the section of s.
func (s *source) writeDefaults(g *group) {
	v, known := s.release()
	noteSnapshotVersion(s, g, known)
	add := func(applies bool, name, value string) {
		if applies && !s.has(name) {
			s.write(newSetting(name, value))
		}
	}
	// Since these versions the feature gates are on.
	var gates []string
	off := func(name string, major, minor int) {
		if known && v.before(major, minor) && !s.namesGate(name) {
			gates = append(gates, name+"=false")
		}
	}
	add(g.serves && s.kind != livenessprobe, "leader-election", "false") // the command topolvm has it on
	switch s.kind {
	case csiProvisioner:
		add(true, "timeout", "10s")
		add(g.serves, "extra-create-metadata", "false")
		add(g.serves && s.on("enable-capacity"), "capacity-ownerref-level", "1")
		add(known && v.before(4, 0), "prevent-volume-mode-conversion", "false")
		add(known && v.before(2, 0), "default-fstype", "ext4")
		off("Topology", 5, 0)
		off(attributesClass, 6, 0)
		noteDefaults(s, g, known, "--feature-gates=VolumeAttributesClass=true since v6, --feature-gates=Topology=true since v5, "+
			"--prevent-volume-mode-conversion since v4, --default-fstype unset since v2")
		s.noteGate(g, "HonorPVReclaimPolicy", known && v.before(5, 1), "as with csi-provisioner v5.1 and later, new PersistentVolumes get "+
			"a finalizer: their reclaim policy also holds if they are deleted before their claim")
	case csiAttacher:
		add(known && v.before(4, 0), "default-fstype", "ext4")
		add(true, "worker-threads", "10")
		noteDefaults(s, g, known, "--default-fstype unset since v4")
	case csiSnapshotter:
		off(groupGate, 8, 7)
		noteDefaults(s, g, known, "--feature-gates="+groupGate+"=true since v8.7")
	case csiResizer:
		if s.has("timeout") || !s.has("resize-timeout") && !s.has("modify-timeout") {
			add(true, "timeout", "10s")
		} else {
			add(true, "resize-timeout", "10s")
			add(true, "modify-timeout", "10s")
		}
		off(attributesClass, 2, 0)
		if !g.serves { // TopoLVM cannot modify volumes
			noteDefaults(s, g, known, "--feature-gates=VolumeAttributesClass=true since v2")
		}
		s.noteGate(g, "RecoverVolumeExpansionFailure", known && v.before(1, 13), "as with csi-resizer v1.13 and later, after a failed "+
			"expansion a claim may request a smaller size")
		if known && v.before(2, 3) && !s.namesGate("AnnotateFsResize") {
			g.info("during an expansion, PersistentVolumes have an annotation with the previous size, as with csi-resizer v2.3 and later " +
				"(AnnotateFsResize)")
		}
	}
	if len(gates) > 0 {
		s.write(newSetting("feature-gates", strings.Join(gates, ",")))
	}
	s.writeCombined()
}

// writeCombined appends flags without which others are refused, or have no effect.
func (s *source) writeCombined() {
	if s.on("node-deployment") && s.on("leader-election") {
		s.write(newSetting("leader-election", "false")) // every instance is active
	}
	if s.has("kube-api-burst") && !s.has("kube-api-qps") {
		s.write(newSetting("kube-api-qps", defaultRate))
	}
	if s.has("kube-api-capacity-burst") && !s.has("kube-api-capacity-qps") {
		s.write(newSetting("kube-api-capacity-qps", "1"))
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

// noteGate notes what changes because a feature gate is always on, if s has it off: by a flag, or because it was off by default.
func (s *source) noteGate(g *group, name string, byDefault bool, change string) {
	value, named := s.gate(name)
	switch {
	case named && !isTrue(value):
		g.changed("--feature-gates=%s=%s has no effect: %s", name, value, change)
	case !named && byDefault:
		g.changed("%s (feature gate %s)", change, name)
	}
}
