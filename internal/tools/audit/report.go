// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"strings"
	"time"

	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// Report is the result of one audit.
type Report struct {
	Driver      string    `json:"driver"`
	Time        time.Time `json:"time"`
	Findings    []Finding `json:"findings"`          // also those of severity unknown: what was not compared, and why
	Volumes     int       `json:"persistentVolumes"` // of the driver
	Attachments int       `json:"volumeAttachments"` // of the driver
}

// Found returns the number of differences and stuck objects.
func (r Report) Found() int {
	n := 0
	for _, f := range r.Findings {
		if f.Severity != finding.Unknown {
			n++
		}
	}
	return n
}

// Text returns r as text.
func (r Report) Text() string {
	text := fmt.Sprintf("Driver %s: PersistentVolumes %d, VolumeAttachments %d\n\n", r.Driver, r.Volumes, r.Attachments)
	var findings []finding.Finding
	for _, f := range r.Findings {
		line := f.Finding
		if subject := f.subject(); subject != "" {
			line.Message = subject + ": " + f.Message
		}
		findings = append(findings, line)
	}
	text += finding.Text(findings)
	if findings != nil {
		text += "\n"
	}
	if r.Found() == 0 {
		return text + "Nothing found.\n"
	}
	return text + fmt.Sprintf("%d found. Nothing was changed.\n", r.Found())
}

// subject names what f is about.
func (f Finding) subject() string {
	var parts []string
	for _, part := range [][2]string{{"", f.Object}, {"volume ", f.VolumeHandle}, {"snapshot ", f.SnapshotHandle}, {"node ", f.Node}} {
		if part[1] != "" {
			parts = append(parts, part[0]+part[1])
		}
	}
	return strings.Join(parts, ", ")
}
