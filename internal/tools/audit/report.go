package audit

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
)

// Report is the outcome of one audit.
type Report struct {
	Driver   string    `json:"driver"`
	Time     time.Time `json:"time"`
	Findings []Finding `json:"findings"` // never null
	// Notes say what was left out, and why.
	Notes []string `json:"notes,omitempty"`
	// Volumes and Attachments is how many objects of the API server were looked at.
	Volumes     int `json:"persistentVolumes"`
	Attachments int `json:"volumeAttachments"`
}

// titles are for people.
var titles = map[Kind]string{
	VolumeWithoutPV:      "Volumes without a PersistentVolume: see whether their data are wanted, then delete them at the driver, or make a PersistentVolume for them",
	PVWithoutVolume:      "PersistentVolumes without a volume: the data are gone, or the driver does not list them",
	AttachedNotPublished: "Attached, but not published: the attacher mends this, with --reconcile-sync; else delete the VolumeAttachment",
	PublishedNotAttached: "Published, but not attached: the volume may be in use at that node all the same; unpublish it at the driver",
	Stuck:                "Being deleted for long",
}

// Text writes r for people.
func (r Report) Text(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Driver %s, %d PersistentVolumes and %d VolumeAttachments of it\n", r.Driver, r.Volumes, r.Attachments)
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "Note: %s\n", n)
	}
	for _, k := range Kinds() {
		title := "\n" + titles[k] + "\n"
		for _, f := range r.Findings {
			if f.Kind != k {
				continue
			}
			b.WriteString(title)
			title = ""
			f.text(&b)
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

func (f Finding) text(b *strings.Builder) {
	var parts []string
	if f.Object != "" {
		parts = append(parts, f.Object)
	}
	if f.VolumeHandle != "" {
		parts = append(parts, "volume "+f.VolumeHandle)
	}
	if f.Node != "" {
		parts = append(parts, "node "+f.Node)
	}
	fmt.Fprintf(b, "  %s: %s\n", strings.Join(parts, ", "), f.Message)
	for _, x := range f.Finalizers {
		fmt.Fprintf(b, "    %s: removed by %s\n", x.Name, x.Remover)
	}
}

// JSON writes r for programs.
func (r Report) JSON(w io.Writer) error {
	if r.Findings == nil {
		r.Findings = []Finding{}
	}
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(r)
}
