package explain

import (
	"fmt"
	"strings"
	"time"
)

// age is d for people, in at most two units.
func age(d time.Duration) string {
	switch d = max(d, 0); {
	case d < time.Minute:
		return d.Truncate(time.Second).String()
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
}

// ago is how long before now t was.
func (f *facts) ago(t time.Time) string { return age(f.now.Sub(t)) + " ago" }

// since is for how long before now something is so.
func (f *facts) since(t time.Time) string { return "for " + age(f.now.Sub(t)) }

// list is at most five of names, and how many more there are.
func list(names []string) string {
	const most = 5
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// count is n of a thing, with its plural.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// sentence ends text with a full stop, and has it on one line: what a driver or another
// program has written may be anything.
func sentence(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if text == "" || strings.HasSuffix(text, ".") {
		return text
	}
	return text + "."
}

// upper is text for the begin of a sentence.
func upper(text string) string {
	if text == "" {
		return text
	}
	return strings.ToUpper(text[:1]) + text[1:]
}

// lower is text for the middle of a sentence.
func lower(text string) string {
	if text == "" {
		return text
	}
	return strings.ToLower(text[:1]) + text[1:]
}
