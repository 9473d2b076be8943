// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/storage-controller/storage-controller/csiclient"
)

// Report is the result of one audit.
type Report struct {
	Driver      string    `json:"driver"`
	Time        time.Time `json:"time"`
	Findings    []Finding `json:"findings"`          // null is written as an empty list
	Notes       []string  `json:"notes,omitempty"`   // what was left out, and why
	Volumes     int       `json:"persistentVolumes"` // of the driver
	Attachments int       `json:"volumeAttachments"` // of the driver
}

// titles are the headings of the kinds in a text report.
var titles = map[Kind]string{
	VolumeWithoutPV: "Volumes without a PersistentVolume. Find out whether the data is still needed, then delete the volume " +
		"in the storage system or create a PersistentVolume for it",
	PVWithoutVolume: "PersistentVolumes without a volume. The volume was deleted, or the driver does not list every volume",
	VolumeTooSmall: "Volumes smaller than their PersistentVolume. An expansion did not take effect at the driver, or the volume was " +
		"shrunk outside of Kubernetes",
	SnapshotWithoutContent: "Snapshots without a VolumeSnapshotContent. Find out whether the data is still needed, then delete the " +
		"snapshot in the storage system or create a VolumeSnapshotContent for it",
	ContentWithoutSnapshot: "VolumeSnapshotContents without a snapshot. The snapshot was deleted, or the driver does not list every " +
		"snapshot. It cannot be restored",
	AttachedNotPublished: "Attached, but not published. An attacher with --reconcile-sync publishes the volume again; " +
		"otherwise delete the VolumeAttachment",
	PublishedNotAttached: "Published, but not attached. Find out whether the volume is still in use on that node, perhaps of another " +
		"cluster, then unpublish it in the storage system",
	Stuck: "Stuck in deletion",
}

// WriteText writes r as text: the findings below a heading for each kind.
func (r Report) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Driver %s: PersistentVolumes %d, VolumeAttachments %d\n", r.Driver, r.Volumes, r.Attachments)
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "Note: %s\n", n)
	}
	for _, k := range Kinds() {
		title := "\n" + titles[k] + "\n"
		for _, f := range r.Findings {
			if f.Kind == k {
				b.WriteString(title)
				title = ""
				f.writeText(&b)
			}
		}
	}
	if len(r.Findings) == 0 {
		b.WriteString("\nNothing found.\n")
	} else {
		fmt.Fprintf(&b, "\n%d found. Nothing was changed.\n", len(r.Findings))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (f Finding) writeText(b *strings.Builder) {
	var parts []string
	if f.Object != "" {
		parts = append(parts, f.Object)
	}
	if f.VolumeHandle != "" {
		parts = append(parts, "volume "+f.VolumeHandle)
	}
	if f.SnapshotHandle != "" {
		parts = append(parts, "snapshot "+f.SnapshotHandle)
	}
	if f.Node != "" {
		parts = append(parts, "node "+f.Node)
	}
	fmt.Fprintf(b, "  %s\n", csiclient.Printable(strings.Join(parts, ", ")+": "+f.Message)) // the driver chose the handles
	for _, x := range f.Finalizers {
		fmt.Fprintf(b, "    %s: removed by %s\n", x.Name, x.Remover)
	}
}

// WriteJSON writes r as indented JSON.
func (r Report) WriteJSON(w io.Writer) error {
	if r.Findings == nil {
		r.Findings = []Finding{}
	}
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(r)
}
