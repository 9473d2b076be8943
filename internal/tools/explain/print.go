package explain

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// WriteJSON writes r for programs.
func (r Report) WriteJSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(r)
}

// WriteText writes r for people.
func (r Report) WriteText(w io.Writer) error {
	var b strings.Builder
	name := r.Name
	if r.Namespace != "" {
		name = r.Namespace + "/" + name
	}
	fmt.Fprintf(&b, "%s %s\n%s\n", r.Kind, name, r.State)
	if r.Driver != "" {
		fmt.Fprintf(&b, "Driver: %s\n", r.Driver)
	}
	b.WriteString("\nWhy:\n")
	for _, f := range r.Findings {
		fmt.Fprintf(&b, "  %-8s %-10s %s\n", f.Severity, f.Topic, f.Sentence)
	}
	b.WriteString("\nFinalizers:\n")
	for _, z := range r.Finalizers {
		how := "removed by "
		if strings.HasPrefix(z.By, "unknown") {
			how = "by whom it is removed is "
		}
		fmt.Fprintf(&b, "  %s\n    %s%s, %s\n", z.Name, how, z.By, z.When)
	}
	if len(r.Finalizers) == 0 {
		b.WriteString("  none\n")
	}
	b.WriteString("\nEvents, newest first:\n")
	for _, e := range r.Events {
		fmt.Fprintf(&b, "  %s ago  %d×  %s %s: %s\n", age(e.Age), e.Count, e.Type, e.Reason, strings.Join(strings.Fields(e.Message), " "))
	}
	switch {
	case r.EventsUnknown != "":
		fmt.Fprintf(&b, "  %s\n", r.EventsUnknown)
	case len(r.Events) == 0:
		b.WriteString("  none\n")
	}
	fmt.Fprintf(&b, "\nNext: %s\n", r.Next)
	_, err := io.WriteString(w, b.String())
	return err
}
