// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package looptest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// Transcript records one story of a loop: the steps of the test, the requests of the loop
// to the API server, its CSI calls and its events, in the order in which they began. It is
// the EventRecorder of a loop that has one.
type Transcript struct {
	f     *Fixture
	story string
	// Hidden lines, with the result of a request that failed, are left out, as the loop does not always send these requests.
	Hidden []string

	mu      sync.Mutex
	entries []entry
}

// entry is a line of a transcript and the lines of its fields.
type entry struct {
	began  time.Time
	line   string
	fields []string
	text   string // of a Kubernetes event
	result string
}

// Record makes the next [Fixture.Start] record what the loop does. story is the text at the
// beginning of the transcript.
func (f *Fixture) Record(story string) *Transcript {
	f.Helper()
	t := &Transcript{f: f, story: story}
	config := rest.CopyConfig(f.ControlPlane.Config())
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return recorder{t, rt} })
	var err error
	f.Requests = config
	f.API, err = kubernetes.NewForConfig(config)
	f.Must(err)
	return t
}

// Step begins the next step of the story.
func (t *Transcript) Step(text string) { t.add(entry{began: time.Now(), line: "\n> " + text}) }

// Event records a Kubernetes event.
func (t *Transcript) Event(object runtime.Object, eventtype, reason, message string) {
	name := "(no metadata)"
	if o, err := meta.Accessor(object); err == nil {
		name = o.GetName()
	} else if ref, ok := object.(*corev1.ObjectReference); ok {
		name = ref.Name
	}
	t.add(entry{began: time.Now(), line: fmt.Sprintf("event %s %s on %s", eventtype, reason, name), text: message})
}

// Eventf records a Kubernetes event.
func (t *Transcript) Eventf(object runtime.Object, eventtype, reason, format string, args ...any) {
	t.Event(object, eventtype, reason, fmt.Sprintf(format, args...))
}

// AnnotatedEventf records a Kubernetes event.
func (t *Transcript) AnnotatedEventf(object runtime.Object, _ map[string]string, eventtype, reason, format string, args ...any) {
	t.Event(object, eventtype, reason, fmt.Sprintf(format, args...))
}

func (t *Transcript) add(e entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.entries = append(t.entries, e)
}

// Golden stops the loop and compares the transcript with the file testdata/NAME.txt, or
// writes the file if UPDATE is set.
func (t *Transcript) Golden(name string) {
	t.f.Helper()
	_ = t.f.Stop(workloop.ErrDrain) // every request is recorded once it has its response
	t.f.Must(t.f.Plugin.WaitIdle(t.f.Context()))
	path, got := "testdata/"+name+".txt", t.String()
	if os.Getenv("UPDATE") != "" {
		t.f.Must(os.WriteFile(path, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	t.f.Must(err)
	if diff := gocmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
		t.f.Errorf("%s differs (run with UPDATE=1 to write it):\n%s", path, diff)
	}
}

// Says waits until the transcript has text, such as the reason of an event that follows the last write.
func (t *Transcript) Says(text string) {
	t.f.Helper()
	kubetest.Eventually(t.f, "the transcript has "+text, func(context.Context) error {
		if got := t.String(); !strings.Contains(got, text) {
			return errors.New(got)
		}
		return nil
	})
}

// String returns the text of the transcript. Generated values have stable names.
func (t *Transcript) String() string {
	t.mu.Lock()
	entries := slices.Clone(t.entries)
	t.mu.Unlock()
	for _, c := range t.f.Plugin.Calls() {
		result := strings.Join(flatten("", ofProto(c.Response)), ", ")
		switch code := status.Code(c.Err); {
		case code == codes.Canceled, code == codes.DeadlineExceeded: // which one, is a race
			result = "no response"
		case code != codes.OK:
			result = code.String()
		case result == "":
			result = "OK"
		}
		entries = append(entries, entry{began: c.Began, line: "csi  " + c.Method, fields: flatten("", ofProto(c.Request)), result: result})
	}
	entries = slices.DeleteFunc(entries, func(e entry) bool {
		return slices.Contains(t.Hidden, strings.TrimSuffix(e.line+" -> "+e.result, " -> "))
	})
	slices.SortStableFunc(entries, func(a, b entry) int { return a.began.Compare(b.began) })
	var b strings.Builder
	for line := range strings.Lines(t.story) {
		b.WriteString("# " + line)
	}
	b.WriteString("\n")
	for n := newNames(t.f); len(entries) > 0; entries = entries[1:] {
		e := entries[0]
		e.line, e.text, e.result = n.replace(e.line), n.replace(e.text), n.replace(e.result)
		for i := range e.fields {
			e.fields[i] = n.replace(e.fields[i])
		}
		b.WriteString(e.String())
	}
	return b.String()
}

// maxWidth is the width of a line with fields. Longer entries have a line for each field.
const maxWidth = 100

// String returns the entry as text.
func (e entry) String() string {
	if e.text != "" {
		return e.line + wrapped(e.text)
	}
	result := ""
	if e.result != "" {
		result = " -> " + e.result
	}
	if one := strings.Join(append([]string{e.line}, e.fields...), " ") + result; len(one) <= maxWidth {
		return one + "\n"
	}
	text := e.line + result + "\n"
	for _, field := range e.fields {
		text += "       " + field + "\n"
	}
	return text
}

// wrapped returns text in lines of at most maxWidth columns.
func wrapped(text string) string {
	var b strings.Builder
	width := maxWidth
	for _, word := range strings.Fields(text) {
		width += 1 + len(word)
		if width > maxWidth {
			b.WriteString("\n      ")
			width = 7 + len(word)
		}
		b.WriteString(" " + word)
	}
	return b.String() + "\n"
}
