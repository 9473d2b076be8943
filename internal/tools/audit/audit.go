// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// Config holds the settings of an audit.
type Config struct {
	// Timeout bounds each page of ListVolumes.
	Timeout time.Duration
	// MaxEntries bounds the entries of a ListVolumes page; 0 lets the driver decide.
	MaxEntries int
	// StuckAfter is the time since its deletion after which an object counts as stuck.
	StuckAfter time.Duration
	// Settle is the time between the two scans of an audit. A difference is reported
	// only if both scans find it.
	Settle time.Duration
}

// DefaultConfig returns the defaults of the settings.
func DefaultConfig() Config {
	return Config{Timeout: 15 * time.Second, StuckAfter: 10 * time.Minute, Settle: 15 * time.Second}
}

// Validate reports every invalid field of c, in the order of the flags.
func (c Config) Validate() error {
	var errs []error
	positive := func(flag string, d time.Duration) {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("%s: must be positive, got %v", flag, d))
		}
	}
	positive("--timeout", c.Timeout)
	positive("--stuck-after", c.StuckAfter)
	positive("--settle", c.Settle)
	if c.MaxEntries < 0 || c.MaxEntries > math.MaxInt32 {
		errs = append(errs, fmt.Errorf("--max-entries: must be between 0 and %d, got %d", math.MaxInt32, c.MaxEntries))
	}
	return errors.Join(errs...)
}

// Lister is the part of csi.ControllerClient that an audit needs.
type Lister interface {
	csiclient.VolumeLister
	csiclient.SnapshotLister
}

// Auditor compares the volumes of one driver with the objects of the API server.
type Auditor struct {
	Config Config
	Driver csiclient.Driver
	CSI    Lister
	// LogicalVolumes makes the LogicalVolumes that Read returns stand for ListVolumes and ListSnapshots, which a driver of TopoLVM does
	// not have. CSI may be nil then.
	LogicalVolumes bool
	// Snapshots also compares the snapshots of the driver, if Read returns VolumeSnapshotContents.
	Snapshots bool
	// Read returns the objects to compare with.
	Read func(context.Context) (ClusterState, error)
	// Now is the clock; nil means that of the process.
	Now func() time.Time
}

// Audit reports the differences that two scans found, the objects that are stuck, and what was not compared. It skips the second scan
// if the first finds no difference.
func (a Auditor) Audit(ctx context.Context) (Report, error) {
	found, state, err := a.scan(ctx)
	if err == nil && slices.ContainsFunc(found, func(f Finding) bool { return f.Topic != Stuck }) {
		select {
		case <-ctx.Done():
			return Report{}, context.Cause(ctx)
		case <-time.After(a.Config.Settle):
		}
		first := found
		found, state, err = a.scan(ctx)
		found = persistent(first, found)
	}
	if err != nil {
		return Report{}, err
	}
	r := Report{Driver: a.Driver.Name, Time: a.now().UTC().Truncate(time.Second), Findings: []Finding{}}
	r.Volumes, r.Attachments = state.count(a.Driver.Name)
	for _, f := range slices.Concat(a.omitted(), state.NotCompared) {
		r.Findings = append(r.Findings, Finding{Finding: f})
	}
	r.Findings = append(r.Findings, found...)
	return r, nil
}

func (a Auditor) now() time.Time {
	if a.Now == nil {
		return time.Now()
	}
	return a.Now()
}

// Lists reports whether the volumes of the driver are listed, and the nodes where they are published. TopoLVM publishes none.
func (a Auditor) Lists() (volumes, nodes bool) {
	c := a.Driver.Controller
	return a.LogicalVolumes || c.ListVolumes, a.LogicalVolumes || c.ListVolumes && c.ListVolumesPublishedNodes
}

// omitted returns findings of severity unknown about objects that are not compared, because the driver does not list them.
func (a Auditor) omitted() (omitted []finding.Finding) {
	switch volumes, nodes := a.Lists(); {
	case !volumes:
		omitted = append(omitted, finding.New(finding.Unknown, "volumes",
			"The driver does not report LIST_VOLUMES. Volumes were not compared, only stuck objects were searched.", ""))
	case !nodes:
		omitted = append(omitted, finding.New(finding.Unknown, "attachments",
			"The driver does not report LIST_VOLUMES_PUBLISHED_NODES. VolumeAttachments were not compared.", ""))
	}
	if can := a.Driver.Controller; can.CreateDeleteSnapshot && !can.ListSnapshots && !a.LogicalVolumes {
		omitted = append(omitted, finding.New(finding.Unknown, "snapshots",
			"The driver does not report LIST_SNAPSHOTS. Snapshots were not compared.", ""))
	}
	return omitted
}

// scan compares once. It asks the driver before the API server, so that a PersistentVolume
// that was created in between does not turn its volume into a finding.
func (a Auditor) scan(ctx context.Context) (_ []Finding, _ ClusterState, err error) {
	c := comparison{driver: a.Driver.Name, stuckAfter: a.Config.StuckAfter}
	if !a.LogicalVolumes {
		if c.listed, err = a.ask(ctx); err != nil {
			return nil, c.cluster, err
		}
	}
	if c.cluster, err = a.Read(ctx); err != nil {
		return nil, c.cluster, err
	}
	if a.LogicalVolumes {
		c.listed = listOf(c.cluster.LogicalVolumes)
	}
	c.now = a.now()
	return c.findings(), c.cluster, nil
}

// ask returns what the driver lists.
func (a Auditor) ask(ctx context.Context) (l Listed, err error) {
	if volumes, nodes := a.Lists(); volumes {
		if l.Volumes, l.Sizes, err = a.list(ctx); err != nil {
			return l, err
		}
		l.Nodes = nodes
	}
	if a.Snapshots && a.Driver.Controller.ListSnapshots {
		l.Snapshots = map[string]bool{}
		add := func(s *csi.Snapshot) { l.Snapshots[s.GetSnapshotId()] = true }
		err = csiclient.EachSnapshot(ctx, a.CSI, a.Config.Timeout, a.Config.MaxEntries, add)
	}
	return l, err
}

// list returns the published nodes and the size of every volume by its handle. The nodes are nil for a
// volume whose entry has no status.
func (a Auditor) list(ctx context.Context) (map[string][]string, map[string]int64, error) {
	listed, sizes := map[string][]string{}, map[string]int64{}
	err := csiclient.EachVolume(ctx, a.CSI, a.Config.Timeout, a.Config.MaxEntries, func(entry *csi.ListVolumesResponse_Entry) {
		if id := entry.GetVolume().GetVolumeId(); id != "" {
			listed[id], sizes[id] = nil, entry.GetVolume().GetCapacityBytes()
			if status := entry.GetStatus(); status != nil {
				listed[id] = append([]string{}, status.GetPublishedNodeIds()...)
			}
		}
	})
	return listed, sizes, err
}
