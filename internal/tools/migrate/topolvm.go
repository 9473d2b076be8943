// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"slices"
	"strings"
)

// legacyVariable selects topolvm.cybozu.com with any value, in topolvm-controller and in the command topolvm.
const legacyVariable = "USE_LEGACY"

// add adds s. topolvm-controller comes first: the socket, the ports and the probes of the new container are its own.
func (g *group) add(s *source) {
	if s.kind == topolvm {
		g.sources, g.command = slices.Insert(g.sources, 0, s), commands[topolvm]
		return
	}
	g.sources = append(g.sources, s)
}

// serves reports whether the new container serves the driver, in place of topolvm-controller.
func (g *group) serves() bool { return g.command == commands[topolvm] }

// merges reports whether the new container runs several roles.
func (g *group) merges() bool { return g.command == "all" || g.serves() && !g.m.PerRole }

// legacy reports whether the new container serves topolvm.cybozu.com.
func (g *group) legacy() bool {
	return slices.ContainsFunc(g.sources, func(s *source) bool { return s.env[legacyVariable] != "" })
}

// prepareTopolvm writes out the defaults of topolvm-controller, and notes what the command topolvm does differently.
func (s *source) prepareTopolvm(g *group) {
	s.writeTopolvmDefaults(g)
	if !s.on(g.m.Tables, "skip-node-finalize") {
		g.changed("PVCs and LogicalVolumes of a deleted Node are cleaned up after more checks than in %s, and also if the Node was "+
			"deleted without its finalizer: docs/topolvm.md. --node-cleanup=off disables it", s.name)
	}
	g.changed("the metrics of %s have the names of storage-controller: docs/metrics.md", s.name)
	if v, known := s.release(); !known || v.before(0, 40) { // v0.40 needs Kubernetes 1.27
		g.changed("the finalizer topolvm.io/pvc is removed from PVCs, /pvc/mutate changes nothing, and pods of a deleted PVC are not "+
			"deleted, as in TopoLVM v0.40 and later. Before Kubernetes 1.27, set --pvc-finalizer-mode=enforce to keep what %s did", s.name)
	}
	for _, f := range s.flags {
		switch {
		case slices.Contains([]string{"minimum-allocation-ext4", "minimum-allocation-xfs", "minimum-allocation-btrfs"}, f.name):
			g.changed("%s takes effect now; topolvm-controller ignores it", f.written())
		case slices.Contains([]string{"zap-devel", "zap-stacktrace-level", "zap-time-encoding"}, f.name):
			g.changed("%s has no effect: set --logging-format and --v", f.written())
		}
	}
	if slices.ContainsFunc(g.sources, func(s *source) bool { return s.kind == csiProvisioner }) {
		g.changed("a PVC has the finalizer storage-controller.io/provisioning while its volume is created, so that no LogicalVolume " +
			"leaks. That takes two more requests per volume; to avoid them, set --provisioning-protection=off")
	}
	if len(g.sources) > 1 && g.merges() {
		g.info("--csi-address was dropped: the roles call the service in memory")
	}
}

// writeTopolvmDefaults sets the flags whose default in the command topolvm differs from that of topolvm-controller, or depends on
// the other sources.
func (s *source) writeTopolvmDefaults(g *group) {
	defaults := []setting{newSetting("leader-election", "true"), newSetting("enable-webhooks", "true")}
	if !slices.ContainsFunc(g.sources, func(s *source) bool { return s.kind == livenessprobe }) {
		defaults = append(defaults, newSetting(driverHealth, ""))
	}
	var written []string
	for _, f := range defaults {
		if _, given := s.lookup(f.name); !given {
			s.add(f)
			written = append(written, f.String())
		}
	}
	if len(written) > 0 {
		g.info("written out, because they differ from the defaults of the command topolvm, or are those of %s alone: %s", s.name,
			enumerate(written))
	}
	if !g.merges() {
		s.flags = slices.Insert(s.flags, 0, newSetting("controllers", roles[topolvm]))
	}
}

// isBundled reports whether s is a sidecar in the image of TopoLVM v0.35 or later. Its version is not known, but not older than the
// changes of defaults that matter to TopoLVM.
func (s *source) isBundled() bool {
	controller := source{kind: topolvm, node: s.node}
	v, known := controller.release()
	return known && !v.before(0, 35) && strings.HasPrefix(ImageName(text(get(s.node, "image"))), "topolvm")
}
