// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package statusz

import (
	_ "embed"
	"html"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/pressure"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

//go:embed page.css
var style string

// writer writes HTML. It does not use html/template, which calls methods by name: the linker would
// keep every method of every client, 23 MB.
type writer struct {
	strings.Builder
	now time.Time
}

// raw writes parts that need no escaping: constants and numbers.
func (w *writer) raw(parts ...string) {
	for _, p := range parts {
		w.WriteString(p)
	}
}

// cell is a cell of a table.
type cell struct {
	label string // shown before the content on a narrow screen
	class string
	text  string // escaped
	code  bool
	raw   string // instead of text, not escaped
}

func head(text string) cell         { return cell{class: "head", text: text} }
func headCode(text string) cell     { return cell{class: "head", text: text, code: true} }
func code(label, text string) cell  { return cell{label: label, class: "name", text: text, code: true} }
func wide(label, text string) cell  { return cell{label: label, class: "text", text: text} }
func plain(label, text string) cell { return cell{label: label, text: text} }

func (w *writer) cell(c cell) {
	content := c.raw
	if content == "" && c.text != "" {
		content = html.EscapeString(c.text)
		if c.code {
			content = "<code>" + content + "</code>"
		}
	}
	w.raw("<td")
	if c.class != "" {
		w.raw(` class="`, c.class, `"`)
	}
	if c.label != "" && content != "" { // an empty cell is hidden on a narrow screen
		w.raw(` data-of="`, c.label, `"`)
	}
	w.raw(">", content, "</td>")
}

func (w *writer) table(titles []string, rows [][]cell) {
	w.raw(`<div class="wide"><table>`, "\n<tr>")
	for _, t := range titles {
		w.raw("<th>", t, "</th>")
	}
	w.raw("</tr>\n")
	for _, row := range rows {
		w.raw("<tr>")
		for _, c := range row {
			w.cell(c)
		}
		w.raw("</tr>\n")
	}
	w.raw("</table></div>\n")
}

// rows returns a row for each item.
func rows[T any](items []T, row func(T) []cell) [][]cell {
	var all [][]cell
	for _, item := range items {
		all = append(all, row(item))
	}
	return all
}

// render returns p as HTML. With refresh the page reloads every five seconds.
func render(p Page, refresh bool) string {
	w := &writer{now: p.Now}
	w.begin(p, refresh)
	w.health(p)
	w.queues(p.Loops, refresh)
	if p.Driver != nil {
		w.driver(*p.Driver)
	}
	w.roles(p.Roles)
	w.lostNodes(p.LostNodes)
	w.settings(p.Flags)
	w.raw("</body>\n</html>\n")
	return w.String()
}

func (w *writer) begin(p Page, refresh bool) {
	title, heading := p.Program, p.Program
	if p.Driver != nil && p.Driver.Driver.Name != "" {
		title, heading = title+" · "+p.Driver.Driver.Name, heading+" for "+p.Driver.Driver.Name
	}
	w.raw(`<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
`)
	toggle := `<a href="?">refresh every 5 s</a>`
	if refresh {
		w.raw("<meta http-equiv=\"refresh\" content=\"5\">\n")
		toggle = `<a href="?refresh=off">stop refreshing</a>`
	}
	w.raw("<title>", html.EscapeString(title), "</title>\n<style>\n", style, "</style>\n</head>\n<body>\n")
	w.raw("<h1>", html.EscapeString(heading), "</h1>\n")
	w.raw(`<p class="quiet">`, html.EscapeString(p.Version), " · ", html.EscapeString(p.Go), " · up ", ago(p.Now, p.Started))
	w.raw(" · ", p.Now.UTC().Format(time.RFC3339), " · ", toggle, "</p>\n")
	w.raw(`<nav><a href="?format=json">JSON</a><a href="flagz">flags</a><a href="./`, html.EscapeString(p.Metrics), `">metrics</a>`)
	w.raw(`<a href="livez?verbose">livez</a><a href="readyz?verbose">readyz</a></nav>`, "\n")
}

func (w *writer) health(p Page) {
	failing, class, verdict := 0, "good", "ok"
	for _, l := range p.Loops {
		failing += l.Failures
	}
	if failing > 0 {
		verdict = "checks pass"
	}
	if slices.ContainsFunc(p.Checks, func(c Check) bool { return c.Error != "" }) {
		class, verdict = "bad", "checks fail"
	}
	w.raw(`<h2>Health: <span class="`, class, `">`, verdict, "</span>")
	if failing > 0 {
		w.raw(`, <span class="bad">`, strconv.Itoa(failing), " failing</span>")
	}
	w.raw("</h2>\n<ul>\n")
	for _, c := range p.Checks {
		result := `<span class="good">ok</span>`
		if c.Error != "" {
			result = `<span class="bad">` + html.EscapeString(c.Error) + "</span>"
		}
		w.raw("<li>", html.EscapeString(c.Kind+" "+c.Name), ": ", result, "</li>\n")
	}
	w.raw("</ul>\n")
}

func (w *writer) queues(loops []workloop.Status, refresh bool) {
	w.raw("<h2>Queues</h2>\n")
	if len(loops) == 0 {
		w.raw(`<p class="quiet">No active queue: this process holds no Lease, or is starting.</p>`, "\n")
	}
	for _, l := range loops {
		failing := "none failing"
		if l.Failures > 0 {
			failing = `<span class="bad">` + strconv.Itoa(l.Failures) + " failing</span>"
		}
		w.raw("<h3>", html.EscapeString(l.Name), ": ", strconv.Itoa(l.Waiting), " waiting, ")
		w.raw(strconv.Itoa(len(l.Running)), " running, ", failing, "</h3>\n")
		if len(l.Running) > 0 {
			w.table([]string{"running", "for"}, rows(l.Running, func(r workloop.Running) []cell {
				return []cell{headCode(withStage(r.Key, r.Stage)), plain("running for", ago(w.now, r.Since))}
			}))
		}
		if len(l.Failing) > 0 {
			w.table([]string{"failing", "attempts", "next attempt", "last error"}, rows(l.Failing, func(f workloop.Failing) []cell {
				key := cell{class: "head bad", text: withStage(f.Key, f.Stage), code: true}
				attempts, next := plain("attempts", strconv.Itoa(f.Attempts)), plain("next attempt", until(w.now, f.Next))
				return []cell{key, attempts, next, wide("last error", f.Error)}
			}))
		}
		if len(l.Recent) > 0 {
			w.attempts(l, refresh)
		}
	}
}

// withStage returns key with the stage of its object, if the loop shows one.
func withStage(key, stage string) string {
	if stage == "" {
		return key
	}
	return key + " (" + stage + ")"
}

// attempts writes the last attempts. They are collapsed while the page refreshes, because each
// refresh collapses them again.
func (w *writer) attempts(l workloop.Status, refresh bool) {
	row := func(mark string) func(workloop.Attempt) []cell {
		return func(d workloop.Attempt) []cell {
			key := cell{class: "head", raw: "<code>" + html.EscapeString(d.Key) + "</code>" + mark}
			return []cell{key, plain("ago", ago(w.now, d.Ended)), plain("took", human(d.Took)), wide("error", d.Error)}
		}
	}
	open := " open"
	if refresh {
		open = ""
	}
	w.raw("<details", open, "><summary>last and slowest attempts</summary>\n")
	slowest := rows(l.Slowest, row(` <span class="quiet">slowest</span>`))
	w.table([]string{"done", "ago", "took", "error"}, append(rows(l.Recent, row("")), slowest...))
	w.raw("</details>\n")
}

func (w *writer) driver(d csiclient.Status) {
	ready := `<span class="good">ready</span>`
	if d.NotReady != "" {
		ready = `<span class="bad">not ready: ` + html.EscapeString(d.NotReady) + "</span>"
	}
	w.raw("<h2>Driver</h2>\n<p>", ready, " · ", html.EscapeString(d.Driver.Name+" "+d.Driver.VendorVersion))
	w.raw(" · <code>", html.EscapeString(d.Address), "</code></p>\n")
	w.raw(`<p class="quiet">`, strings.Join(d.Driver.CapabilityNames(), " "), "</p>\n")
	w.raw("<h3>Calls in flight: ", strconv.Itoa(len(d.Running)), "</h3>\n")
	if len(d.Running) > 0 {
		w.table([]string{"call", "volume", "for"}, rows(d.Running, func(c csiclient.Call) []cell {
			return []cell{head(c.Method), code("volume", c.Volume), plain("for", ago(w.now, c.Began))}
		}))
	}
	if len(d.Limits) > 0 {
		w.raw("<h3>Limited calls</h3>\n")
		w.table([]string{"call", "at a time", "running", "waiting", "for", "because"}, rows(d.Limits, func(l pressure.Limit) []cell {
			return []cell{head(l.Method), plain("at a time", strconv.Itoa(l.Limit)), plain("running", strconv.Itoa(l.Running)),
				plain("waiting", strconv.Itoa(l.Waiting)), plain("for", ago(w.now, l.Since)), wide("because", l.Reason)}
		}))
	}
	completed := func(c csiclient.Call) []cell {
		took, began := plain("took", human(c.Took)), plain("ago", ago(w.now, c.Began))
		return []cell{head(c.Method), code("volume", c.Volume), began, took, plain("code", c.Code), wide("error", c.Error)}
	}
	titles := []string{"call", "volume", "ago", "took", "code", "error"}
	if len(d.Failed) > 0 {
		w.raw("<h3>Last failed calls</h3>\n")
		w.table(titles, rows(d.Failed, completed))
	}
	if len(d.Slowest) > 0 {
		w.raw("<h3>Slowest calls</h3>\n")
		w.table(titles, rows(d.Slowest, completed))
	}
}

// lostNodes writes the records of lost nodes, if there are any.
func (w *writer) lostNodes(nodes []LostNode) {
	if len(nodes) == 0 {
		return
	}
	w.raw("<h2>Lost nodes</h2>\n")
	w.table([]string{"node", "state", "lost for", "next"}, rows(nodes, func(n LostNode) []cell {
		since := ""
		if !n.Since.IsZero() {
			since = ago(w.now, n.Since)
		}
		return []cell{headCode(n.Node), plain("state", n.State), plain("lost for", since), wide("next", n.Next)}
	}))
}

func (w *writer) roles(roles []Role) {
	w.raw("<h2>Roles</h2>\n")
	w.table([]string{"role", "state", "Lease", "holder"}, rows(roles, func(r Role) []cell {
		working := `<span class="good">working</span>`
		l := r.Lease
		if r.Disabled != "" {
			return []cell{head(r.Name), {label: "state", raw: `<span class="bad">disabled</span>: ` + html.EscapeString(r.Disabled)}, {},
				{}}
		}
		if l == nil {
			return []cell{head(r.Name), {label: "state", raw: working}, plain("Lease", "none"), {}}
		}
		lease := code("Lease", l.Lease)
		switch {
		case l.Leader:
			return []cell{head(r.Name), {label: "state", raw: working + " for " + ago(w.now, l.Since)}, lease,
				plain("holder", "this process")}
		case l.Holder == "":
			return []cell{head(r.Name), plain("state", "standby"), lease, plain("holder", "unknown")}
		}
		return []cell{head(r.Name), plain("state", "standby"), lease, code("holder", l.Holder)}
	}))
}

func (w *writer) settings(flags []Flag) {
	w.raw("<h2>Settings that are not the default</h2>\n")
	if len(flags) == 0 {
		w.raw(`<p class="quiet">None.</p>`, "\n")
		return
	}
	w.table([]string{"flag", "value", "from"}, rows(flags, func(f Flag) []cell {
		value := wide("value", f.Value)
		value.code = true
		return []cell{headCode("--" + f.Name), value, plain("from", f.Origin)}
	}))
}
