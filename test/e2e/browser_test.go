// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

//go:build browser

package e2e

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/test/browser"
)

// poolError is as long as errors of drivers are, has a word that has no end, and tries to
// load something from elsewhere.
const poolError = `rpc to backend: allocate extent: pool "ssd-rack-17" has 0 of 12 TiB left <img src="http://elsewhere.example/x.png"> ` +
	`(trace 0af7651916cd43dd8448eb211c80319c0af7651916cd43dd8448eb211c80319c0af7651916cd43dd8448eb211c80319c)`

var views = map[string]browser.View{
	"phone-light": {Width: 390, Height: 844, Phone: true}, "phone-dark": {Width: 390, Height: 844, Phone: true, Dark: true},
	"desk-light": {Width: 1280, Height: 900}, "desk-dark": {Width: 1280, Height: 900, Dark: true},
}

// outside is the elements of the page that are not wholly between its left and right edge:
// content can be read only by scrolling sideways, or not at all. The first is the page
// itself, when it is wider than the window.
const outside = `(() => {
	const width = %d, found = [];
	if (document.documentElement.scrollWidth > width) found.push("the page: " + document.documentElement.scrollWidth);
	for (const e of document.body.querySelectorAll("*")) {
		const r = e.getBoundingClientRect();
		if (r.width > 0 && (r.left < -0.5 || r.right > width + 0.5 || e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0))
			found.push(e.tagName + " " + Math.round(r.left) + "-" + Math.round(r.right) + " " + e.innerText.slice(0, 60));
	}
	return found;
})()`

// faint is the texts of the page with less contrast than WCAG 2.2 asks for (1.4.3, level AA).
const faint = `(() => {
	const probe = document.body.appendChild(document.createElement("i"));
	probe.style.setProperty("background-color", "Canvas");
	const numbers = c => c.match(/[\d.]+/g).map(Number);
	const background = numbers(getComputedStyle(probe).backgroundColor);
	probe.remove();
	const luminance = c => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
		const v = c[i] / 255;
		return sum + weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
	}, 0);
	const found = [];
	for (const e of document.body.querySelectorAll("*")) {
		if (![...e.childNodes].some(n => n.nodeType === Node.TEXT_NODE && n.data.trim())) continue;
		let opacity = 1;
		for (let a = e; a; a = a.parentElement) opacity *= getComputedStyle(a).opacity;
		const seen = numbers(getComputedStyle(e).color).map((v, i) => v * opacity + background[i] * (1 - opacity));
		const [dark, light] = [luminance(seen), luminance(background)].sort((a, b) => a - b);
		const ratio = (light + 0.05) / (dark + 0.05);
		if (!(ratio >= 4.5)) found.push(e.tagName + "." + e.className + " " + ratio.toFixed(2));
	}
	return found;
})()`

// TestStatusPageInABrowser has a claim that fails and a call that hangs, and looks at the
// page of the process on a phone and at a desk, by day and by night.
func TestStatusPageInABrowser(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	p, base := e.busy()
	b := browser.Start(t)
	for name, view := range views {
		t.Run(name, func(t *testing.T) {
			page := b.Page(t, view)
			page.Open(base + "/statusz?refresh=off")
			keep(t, "statusz-"+name, page.Screenshot())
			var wrong []string
			if page.Eval(fmt.Sprintf(outside, view.Width), &wrong); len(wrong) > 0 {
				t.Errorf("not wholly on the page: %q", wrong)
			}
			if page.Eval(faint, &wrong); len(wrong) > 0 {
				t.Errorf("hard to read: %q", wrong)
			}
			var text, background string
			page.Eval("document.body.innerText", &text)
			for _, want := range []string{poolError, e.ns + "/failing", e.ns + "/hanging", "1 failing", "CreateVolume",
				"checks pass, 1 failing", "attacher"} {
				if !strings.Contains(text, want) {
					t.Errorf("%q cannot be seen", want)
				}
			}
			page.Eval(`getComputedStyle(document.documentElement).colorScheme + matchMedia("(prefers-color-scheme: dark)").matches`,
				&background)
			if want := fmt.Sprint("light dark", view.Dark); background != want {
				t.Errorf("the colours: %q, want %q", background, want)
			}
			if got, want := page.Requests(), []string{"GET " + base + "/statusz?refresh=off"}; !slices.Equal(got, want) {
				t.Errorf("requests %q, want %q", got, want)
			}
			if c := page.Complaints(); len(c) > 0 {
				t.Errorf("the browser complains: %q", c)
			}
		})
	}
	p.lives()
}

// TestStatusPageInABrowserRefreshesItself waits until the page was loaded again, and
// sees that a claim has come to it.
func TestStatusPageInABrowserRefreshesItself(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	_, base := e.busy()
	page := browser.Start(t).Page(t, views["desk-light"])
	page.Open(base + "/statusz")
	class := e.class(false, nil)
	e.claim("later", class)
	e.wait("CreateVolume", 3)
	page.WaitLoads(page.Loads() + 2) // the first of them may have been under way
	var text string
	if page.Eval("document.body.innerText", &text); !strings.Contains(text, e.ns+"/later") {
		t.Errorf("the claim is not on the page:\n%s", text)
	}
	for _, r := range page.Requests() {
		if r != "GET "+base+"/statusz" {
			t.Errorf("request %q", r)
		}
	}
}

// TestStatusPageInABrowserLoadsNothing injects scripts that try to send the content of the page
// elsewhere: the browser refuses.
func TestStatusPageInABrowserLoadsNothing(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	_, base := e.busy()
	page := browser.Start(t).Page(t, views["desk-light"])
	page.Open(base + "/statusz?refresh=off")
	var answer string
	page.Eval(`fetch("/flagz").then(() => "sent", e => "refused")`, &answer)
	if answer != "refused" {
		t.Errorf("a request of a script is %s", answer)
	}
	for _, tag := range []string{"img", "iframe", "script", "embed"} {
		page.Eval(`new Promise(done => {
			document.addEventListener("securitypolicyviolation", v => done(v.effectiveDirective), {once: true});
			const e = document.createElement("`+tag+`");
			e.addEventListener("load", () => done("loaded"));
			e.src = "/flagz?`+tag+`";
			document.body.append(e);
		})`, &answer)
		if !strings.Contains(answer, "-src") {
			t.Errorf("%s: %s", tag, answer)
		}
	}
}

// TestStatusPageInABrowserLinks follows every link of the page, with metrics at a path of
// their own.
func TestStatusPageInABrowserLinks(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 1)
	_, base := e.busy("--metrics-path=/numbers/of-it")
	page := browser.Start(t).Page(t, views["phone-light"])
	page.Open(base + "/")
	var links []string
	page.Eval(`[location.pathname, ...[...document.links].map(a => a.href)]`, &links)
	at, links := links[0], links[1:]
	if at != "/statusz" {
		t.Errorf("the root leads to %s", at)
	}
	want := map[string]string{
		"/statusz?format=json": `"program": "storage-controller"`, "/statusz?refresh=off": "refresh every 5 s", "/flagz": "metrics-path",
		"/numbers/of-it": "csi_sidecar_operations_seconds",
		"/livez?verbose": "ok", "/readyz?verbose": "driver",
	}
	for _, link := range links {
		u, err := url.Parse(link)
		if err != nil {
			t.Fatal(err)
		}
		text, known := want[u.RequestURI()]
		if !known {
			t.Errorf("the link %s is not expected", link)
			continue
		}
		delete(want, u.RequestURI())
		page.Open(link)
		var body string
		if page.Eval("document.body.innerText", &body); !strings.Contains(body, text) {
			t.Errorf("%s does not show %q:\n%s", link, text, body)
		}
	}
	if len(want) > 0 {
		t.Errorf("there is no link to %v", want)
	}
}

// busy runs a process with the claim failing, of which the first attempt failed, and the
// claim hanging, of which the call is under way; it returns also where it serves.
func (e *env) busy(args ...string) (*process, string) {
	e.t.Helper()
	e.plugin.Next("CreateVolume", csitest.Fail(codes.ResourceExhausted, poolError))
	p := e.run("all", append([]string{"--leader-election", "--leader-election-namespace=" + e.ns, "--retry-interval-start=1h",
		"--retry-interval-max=1h", "--http-endpoint=127.0.0.1:0"}, args...)...)
	class := e.class(false, nil)
	e.claim("failing", class)
	e.wait("CreateVolume", 1)
	e.plugin.Always("CreateVolume", csitest.Hang())
	e.t.Cleanup(e.plugin.Release)
	e.claim("hanging", class)
	e.wait("CreateVolume", 2)
	e.eventually("the page shows both", func(context.Context) error {
		if _, body := p.get("/statusz"); !strings.Contains(body, "1 running, <span class=\"bad\">1 failing") {
			return fmt.Errorf("the page is %s", body)
		}
		return nil
	})
	return p, "http://" + served.FindStringSubmatch(p.logged())[1]
}

// keep writes a screenshot into the directory that the environment variable SCREENSHOTS names.
func keep(t *testing.T, name string, png []byte) {
	t.Helper()
	if dir := os.Getenv("SCREENSHOTS"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644); err != nil {
			t.Error(err)
		}
	}
}
