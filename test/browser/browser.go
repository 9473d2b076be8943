// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package browser lets tests look at pages as people do: it starts a Chromium and
// drives it through the DevTools protocol.
package browser

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience bounds each wait for the browser. A machine that runs all tests at once is slow.
const patience = time.Minute

// flags keep Chromium to what it is told: no display, and no requests of its own.
var flags = []string{
	"--headless", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
	"--no-default-browser-check", "--disable-background-networking", "--disable-component-update", "--disable-sync",
	"--disable-extensions", "--password-store=basic", "--no-proxy-server",
}

// Browser is a running Chromium.
type Browser struct{ wire *wire }

// Start starts the Chromium that the environment variable CHROMIUM names, or else the one in
// the path, and stops it at the end of the test. It fails the test when there is none.
func Start(t testing.TB) *Browser {
	t.Helper()
	path, err := exec.LookPath(name())
	if err != nil {
		t.Fatalf("looking for a browser: %v; install Debian's package chromium, or name one with the environment variable CHROMIUM", err)
	}
	profile, err := os.MkdirTemp("", "chromium-")
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{"--user-data-dir=" + filepath.Join(profile, "data")}, flags...)
	if os.Geteuid() == 0 {
		args = append(args, "--no-sandbox") // Chromium refuses to start as root with it
	}
	cmd := exec.Command(path, append(args, "about:blank")...)
	// Its helpers are in its process group, and it looks for settings in the home directory.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Env = append(os.Environ(), "HOME="+profile)
	commands, toBrowser, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	fromBrowser, answers, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.ExtraFiles = []*os.File{commands, answers} // descriptors 3 and 4, as --remote-debugging-pipe has them
	if err := cmd.Start(); err != nil {
		t.Fatalf("starting %s: %v", path, err)
	}
	commands.Close()
	answers.Close()
	b := &Browser{newWire(toBrowser, fromBrowser)}
	t.Cleanup(func() {
		toBrowser.Close() // which ends it, as would the death of this process
		timer := time.AfterFunc(patience, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
		_ = cmd.Wait() // how it ends does not matter
		timer.Stop()
		<-b.wire.gone
		_ = os.RemoveAll(profile) // a helper that has not ended yet may still write; it is in the directory for temporary files
	})
	return b
}

func name() string {
	if n := os.Getenv("CHROMIUM"); n != "" {
		return n
	}
	return "chromium"
}

// View is how a page is looked at.
type View struct {
	Width, Height int
	Phone         bool // a touch screen with two pixels for each of CSS
	Dark          bool // the colour scheme that the reader prefers
}

// Page is a tab, and what has happened in it.
type Page struct {
	t       testing.TB
	wire    *wire
	session string // "" for the browser itself

	mu         sync.Mutex
	changed    chan struct{} // closed at the next event
	loads      int
	requests   []string
	complaints []string
}

// Page opens a new, empty tab for t, which may be a part of the test that started the browser.
func (b *Browser) Page(t testing.TB, v View) *Page {
	t.Helper()
	p := &Page{t: t, wire: b.wire, changed: make(chan struct{})}
	var target struct{ TargetID string }
	p.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	p.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	p.session = attached.SessionID
	b.wire.listen(p.session, p.event)
	for _, domain := range []string{"Page", "Network", "Log", "Runtime"} {
		p.call(domain+".enable", nil, nil)
	}
	p.See(v)
	return p
}

// See changes how the page is looked at.
func (p *Page) See(v View) {
	p.t.Helper()
	scale, scheme := 1, "light"
	if v.Phone {
		scale = 2
	}
	if v.Dark {
		scheme = "dark"
	}
	p.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": v.Width, "height": v.Height, "deviceScaleFactor": scale,
		"mobile": v.Phone}, nil)
	p.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}},
		nil)
}

// Open loads url.
func (p *Page) Open(url string) {
	p.t.Helper()
	before := p.Loads()
	var answer struct{ ErrorText string }
	p.call("Page.navigate", map[string]any{"url": url}, &answer)
	if answer.ErrorText != "" {
		p.t.Fatalf("opening %s: %s", url, answer.ErrorText)
	}
	p.WaitLoads(before + 1)
}

// WaitLoads waits until there have been n loads in this tab.
func (p *Page) WaitLoads(n int) {
	p.t.Helper()
	late := time.After(patience)
	for {
		p.mu.Lock()
		loads, changed := p.loads, p.changed
		p.mu.Unlock()
		if loads >= n {
			return
		}
		select {
		case <-changed:
		case <-p.wire.gone:
			p.t.Fatal("the browser has gone")
		case <-late:
			p.t.Fatalf("after %v there have been %d loads, want %d", patience, loads, n)
		}
	}
}

// Loads is how many loads there have been.
func (p *Page) Loads() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.loads
}

// Requests is the method and URL of each request that was made, in their order.
func (p *Page) Requests() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.requests...)
}

// Complaints is what the browser has found wrong with the page: refused by its policy,
// not loaded, failed.
func (p *Page) Complaints() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.complaints...)
}

// Eval sets result to the value of a JavaScript expression, or of the promise that it is.
func (p *Page) Eval(expression string, result any) {
	p.t.Helper()
	var answer struct {
		Result           struct{ Value raw }
		ExceptionDetails *struct {
			Exception struct{ Description string }
		}
	}
	p.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &answer)
	if e := answer.ExceptionDetails; e != nil {
		p.t.Fatalf("evaluating %s: %s", expression, e.Exception.Description)
	}
	if result != nil {
		if err := answer.Result.Value.into(result); err != nil {
			p.t.Fatalf("evaluating %s: %v", expression, err)
		}
	}
}

// Screenshot returns a PNG of the whole page, including the part below the viewport.
func (p *Page) Screenshot() []byte {
	p.t.Helper()
	var layout struct {
		CSSContentSize struct{ Width, Height float64 }
	}
	p.call("Page.getLayoutMetrics", nil, &layout)
	size := layout.CSSContentSize
	clip := map[string]any{"x": 0, "y": 0, "width": size.Width, "height": size.Height, "scale": 1}
	var answer struct{ Data []byte }
	p.call("Page.captureScreenshot", map[string]any{"format": "png", "captureBeyondViewport": true, "clip": clip}, &answer)
	return answer.Data
}

func (p *Page) call(method string, params, result any) {
	p.t.Helper()
	if err := p.wire.call(p.session, method, params, result); err != nil {
		p.t.Fatal(err)
	}
}

// event records an event of the browser about the page.
func (p *Page) event(method string, params raw) {
	var e struct {
		Request struct{ Method, URL string }
		Entry   struct{ Level, Text, URL string }
	}
	if err := params.into(&e); err != nil {
		p.complain(fmt.Sprintf("event %s: %v", method, err))
		return
	}
	switch method {
	case "Page.loadEventFired":
		p.note(func() { p.loads++ })
	case "Network.requestWillBeSent":
		p.note(func() { p.requests = append(p.requests, e.Request.Method+" "+e.Request.URL) })
	case "Log.entryAdded":
		p.complain(e.Entry.Level + ": " + e.Entry.Text + " " + e.Entry.URL)
	case "Runtime.exceptionThrown":
		p.complain("a script has failed")
	}
}

func (p *Page) complain(text string) {
	p.note(func() { p.complaints = append(p.complaints, text) })
}

func (p *Page) note(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	close(p.changed)
	p.changed = make(chan struct{})
}
