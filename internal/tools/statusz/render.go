package statusz

import (
	_ "embed"
	"html"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

//go:embed page.css
var style string

// writer writes HTML. That is done by hand: the templates of Go reach methods by their
// names, for which the linker has to keep all methods of all clients, 23 MB of them.
type writer struct {
	strings.Builder
	now time.Time
}

// raw writes what is HTML already: constants and numbers.
func (w *writer) raw(parts ...string) {
	for _, p := range parts {
		w.WriteString(p)
	}
}

// cell is a field of a table. What is not raw is escaped.
type cell struct {
	of    string // what it says, on a phone; "" for nothing
	class string
	text  string
	code  bool
	raw   string // instead of text
}

func head(text string) cell     { return cell{class: "head", text: text} }
func headCode(text string) cell { return cell{class: "head", text: text, code: true} }
func name(of, text string) cell { return cell{of: of, class: "name", text: text, code: true} }
func long(of, text string) cell { return cell{of: of, class: "text", text: text} }
func of(of, text string) cell   { return cell{of: of, text: text} }

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
	if c.of != "" && content != "" { // an empty cell is not shown on a phone
		w.raw(` data-of="`, c.of, `"`)
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

// rows makes one of each item.
func rows[T any](items []T, row func(T) []cell) [][]cell {
	var all [][]cell
	for _, item := range items {
		all = append(all, row(item))
	}
	return all
}

// render is p as a page, which loads itself again every few seconds with refresh.
func render(p Page, refresh bool) string {
	w := &writer{now: p.Now}
	w.begin(p, refresh)
	w.health(p)
	w.queues(p.Loops, refresh)
	if p.Driver != nil {
		w.driver(*p.Driver)
	}
	w.roles(p.Roles)
	w.settings(p.Flags)
	w.raw("</body>\n</html>\n")
	return w.String()
}

func (w *writer) begin(p Page, refresh bool) {
	driver := ""
	if p.Driver != nil {
		driver = p.Driver.Driver.Name
	}
	w.raw("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n")
	toggle := `<a href="?">refresh every 5 s</a>`
	if refresh {
		w.raw("<meta http-equiv=\"refresh\" content=\"5\">\n")
		toggle = `<a href="?refresh=off">stop refreshing</a>`
	}
	title, heading := p.Program, p.Program
	if driver != "" {
		title, heading = title+" · "+driver, heading+" for "+driver
	}
	w.raw("<title>", html.EscapeString(title), "</title>\n<style>\n", style, "</style>\n</head>\n<body>\n<h1>", html.EscapeString(heading), "</h1>\n")
	w.raw(`<p class="quiet">`, html.EscapeString(p.Version), " · ", html.EscapeString(p.Go), " · up ", ago(p.Now, p.Started), " · ", p.Now.UTC().Format(time.RFC3339), " · ", toggle, "</p>\n")
	w.raw(`<nav><a href="?format=json">JSON</a><a href="flagz">flags</a><a href="./`, html.EscapeString(p.Metrics), `">metrics</a><a href="livez?verbose">livez</a><a href="readyz?verbose">readyz</a></nav>`, "\n")
}

func (w *writer) health(p Page) {
	failing, class, verdict := 0, "good", "all is well"
	for _, l := range p.Loops {
		failing += l.Failures
	}
	if failing > 0 {
		verdict = "the checks pass"
	}
	if slices.ContainsFunc(p.Checks, func(c Check) bool { return c.Error != "" }) {
		class, verdict = "bad", "something is wrong"
	}
	w.raw(`<h2>Health: <span class="`, class, `">`, verdict, "</span>")
	if failing > 0 {
		w.raw(`, <span class="bad">`, strconv.Itoa(failing), " failing</span>")
	}
	w.raw("</h2>\n<ul>\n")
	for _, c := range p.Checks {
		said := `<span class="good">ok</span>`
		if c.Error != "" {
			said = `<span class="bad">` + html.EscapeString(c.Error) + "</span>"
		}
		w.raw("<li>", html.EscapeString(c.Kind+" "+c.Name), ": ", said, "</li>\n")
	}
	w.raw("</ul>\n")
}

func (w *writer) queues(loops []workloop.Status, refresh bool) {
	w.raw("<h2>Queues</h2>\n")
	if len(loops) == 0 {
		w.raw(`<p class="quiet">No queue is worked on: this process has no Lease, or has just started.</p>`, "\n")
	}
	for _, l := range loops {
		failing := "none failing"
		if l.Failures > 0 {
			failing = `<span class="bad">` + strconv.Itoa(l.Failures) + " failing</span>"
		}
		w.raw("<h3>", html.EscapeString(l.Name), ": ", strconv.Itoa(l.Waiting), " waiting, ", strconv.Itoa(len(l.Running)), " running, ", failing, "</h3>\n")
		if len(l.Running) > 0 {
			w.table([]string{"worked on", "for"}, rows(l.Running, func(r workloop.Running) []cell {
				return []cell{headCode(r.Key), of("worked on for", ago(w.now, r.Since))}
			}))
		}
		if len(l.Failing) > 0 {
			w.table([]string{"failing", "attempts", "next try", "last error"}, rows(l.Failing, func(f workloop.Failing) []cell {
				return []cell{{class: "head bad", text: f.Key, code: true}, of("attempts", strconv.Itoa(f.Attempts)), of("next try", until(w.now, f.Next)), long("last error", f.Error)}
			}))
		}
		if len(l.Recent) > 0 {
			w.attempts(l, refresh)
		}
	}
}

// attempts is folded while the page refreshes itself: it would fold again each time.
func (w *writer) attempts(l workloop.Status, refresh bool) {
	row := func(mark string) func(workloop.Attempt) []cell {
		return func(d workloop.Attempt) []cell {
			key := cell{class: "head", raw: "<code>" + html.EscapeString(d.Key) + "</code>" + mark}
			return []cell{key, of("ago", ago(w.now, d.Ended)), of("took", took(d.Took)), long("error", d.Error)}
		}
	}
	open := " open"
	if refresh {
		open = ""
	}
	w.raw("<details", open, "><summary>last attempts, and the slowest</summary>\n")
	w.table([]string{"done", "ago", "took", "error"}, append(rows(l.Recent, row("")), rows(l.Slowest, row(` <span class="quiet">slowest</span>`))...))
	w.raw("</details>\n")
}

func (w *writer) driver(d csiclient.Status) {
	ready := `<span class="good">ready</span>`
	if d.NotReady != "" {
		ready = `<span class="bad">not ready: ` + html.EscapeString(d.NotReady) + "</span>"
	}
	w.raw("<h2>Driver</h2>\n<p>", ready, " · ", html.EscapeString(d.Driver.Name+" "+d.Driver.VendorVersion), " · <code>", html.EscapeString(d.Address), "</code></p>\n")
	w.raw(`<p class="quiet">`, strings.Join(d.Driver.CapabilityNames(), " "), "</p>\n<h3>Calls in flight: ", strconv.Itoa(len(d.Running)), "</h3>\n")
	if len(d.Running) > 0 {
		w.table([]string{"call", "volume", "for"}, rows(d.Running, func(c csiclient.Call) []cell {
			return []cell{head(c.Method), name("volume", c.Volume), of("for", ago(w.now, c.Began))}
		}))
	}
	if len(d.Failed) > 0 {
		w.raw("<h3>Last failed calls</h3>\n")
		w.table([]string{"call", "volume", "ago", "took", "code", "error"}, rows(d.Failed, func(c csiclient.Call) []cell {
			return []cell{head(c.Method), name("volume", c.Volume), of("ago", ago(w.now, c.Began)), of("took", took(c.Took)), of("code", c.Code), long("error", c.Error)}
		}))
	}
	if len(d.Slowest) > 0 {
		w.raw("<h3>Slowest calls</h3>\n")
		w.table([]string{"call", "volume", "took", "ago", "code"}, rows(d.Slowest, func(c csiclient.Call) []cell {
			return []cell{head(c.Method), name("volume", c.Volume), of("took", took(c.Took)), of("ago", ago(w.now, c.Began)), of("code", c.Code)}
		}))
	}
}

func (w *writer) roles(roles []Role) {
	w.raw("<h2>Roles</h2>\n")
	w.table([]string{"role", "state", "Lease", "holder"}, rows(roles, func(r Role) []cell {
		working := `<span class="good">working</span>`
		switch l := r.Lease; {
		case l == nil:
			return []cell{head(r.Name), {of: "state", raw: working}, of("Lease", "none"), {}}
		case l.Leader:
			return []cell{head(r.Name), {of: "state", raw: working + " for " + ago(w.now, l.Since)}, name("Lease", l.Lease), of("holder", "this process")}
		case l.Holder == "":
			return []cell{head(r.Name), of("state", "waiting for the Lease"), name("Lease", l.Lease), of("holder", "nobody known")}
		default:
			return []cell{head(r.Name), of("state", "waiting for the Lease"), name("Lease", l.Lease), name("holder", l.Holder)}
		}
	}))
}

func (w *writer) settings(flags []Flag) {
	w.raw("<h2>Settings that are not the default</h2>\n")
	if len(flags) == 0 {
		w.raw(`<p class="quiet">None.</p>`, "\n")
		return
	}
	w.table([]string{"flag", "value", "from"}, rows(flags, func(f Flag) []cell {
		return []cell{headCode("--" + f.Name), {of: "value", class: "text", text: f.Value, code: true}, of("from", f.Origin)}
	}))
}
