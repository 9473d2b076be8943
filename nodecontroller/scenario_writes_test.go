package nodecontroller

import (
	"context"
	"errors"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	dto "github.com/prometheus/client_model/go"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// sent is a request of the controller, apart from those of its watches and its events.
type sent struct {
	line string // METHOD kind/name, without what all names of the scenario begin with
	at   time.Time
}

func (s sent) writes() bool { return !strings.HasPrefix(s.line, http.MethodGet+" ") }

// requests is all that the controllers of a scenario asked for, in its order.
type requests struct {
	mu   sync.Mutex
	sent []sent
	// only is the writes that the scenario names; nil means that it names none itself.
	only []string
}

var apiPath = regexp.MustCompile(`^/(api/v1|apis/[^/]+/[^/]+)/(namespaces/[^/]+/)?`)

// record writes down what is asked for and passes it on.
func (f *fixture) record(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	line := r.Method + " " + strings.Replace(apiPath.ReplaceAllString(r.URL.Path, ""), "/"+f.ns+"-", "/", 1)
	var dry bool
	if r, dry = bodyHas(r, "All"); dry && r.Method == http.MethodDelete || r.URL.Query().Get("dryRun") == "All" {
		line += " as a trial"
	}
	if line != "POST events" { // those of a command, whose texts are looked at elsewhere
		f.requests.mu.Lock()
		f.requests.sent = append(f.requests.sent, sent{line, time.Now()})
		f.requests.mu.Unlock()
	}
	pass.ServeHTTP(w, r)
}

// recorded is a client for a command, whose requests are recorded as those of controllers.
func (f *fixture) recorded() kubernetes.Interface {
	f.Helper()
	client, err := kubernetes.NewForConfig(kubetest.Proxy(f.T, f.cp.Config(), f.record))
	f.must(err)
	return client
}

// asked is when the controllers asked for just this.
func (f *fixture) asked(line string) (times []time.Time) {
	f.requests.mu.Lock()
	defer f.requests.mu.Unlock()
	for _, s := range f.requests.sent {
		if s.line == line {
			times = append(times, s.at)
		}
	}
	return times
}

// onlyWrites names what the controllers may write in this scenario; whatever else they
// write until its end, to whichever object, fails it.
func (f *fixture) onlyWrites(lines ...string) {
	f.requests.mu.Lock()
	defer f.requests.mu.Unlock()
	f.requests.only = append([]string{}, lines...)
}

// checkWrites is for the end of a scenario, when its controllers have stopped.
func (f *fixture) checkWrites() {
	f.requests.mu.Lock()
	defer f.requests.mu.Unlock()
	var lines []string
	for _, s := range f.requests.sent {
		if s.writes() {
			lines = append(lines, s.line)
		}
	}
	if f.requests.only == nil {
		return
	}
	for _, line := range lines {
		if !slices.Contains(f.requests.only, line) {
			f.Errorf("the controller sent %q, of which only %q may be sent", lines, f.requests.only)
			return
		}
	}
}

// failures is how often a step of the controller failed, and was tried again or not.
func (f *fixture) failures() (n float64) {
	f.Helper()
	families, err := f.reg.Gather()
	f.must(err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			failed := slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool {
				return l.GetName() == "result" && slices.Contains([]string{"conflict", "forbidden", "error"}, l.GetValue())
			})
			if family.GetName() == "workqueue_retries_total" || failed {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n
}

// soon checks that no more than limit has passed since begin.
func (f *fixture) soon(what string, begin time.Time, limit time.Duration) {
	f.Helper()
	if d := time.Since(begin); d > limit {
		f.Errorf("%s after %v, want %v at most", what, d, limit)
	}
}

// silent checks that the controller has told of nothing. It says something itself first:
// what was said before that has been written, then.
func (f *fixture) silent() {
	f.Helper()
	const reason = "ScenarioMarks"
	f.c.deps.Events.Event(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: f.ns}, TypeMeta: metav1.TypeMeta{Kind: "Namespace", APIVersion: "v1"}}, corev1.EventTypeNormal, reason, "All that was said before is written.")
	kubetest.Eventually(f.T, "events are written", func(context.Context) error {
		if len(f.events("Namespace", f.ns, reason)) == 0 {
			return errors.New("they are not")
		}
		return nil
	})
	list, err := f.client.CoreV1().Events("").List(f.Context(), metav1.ListOptions{})
	f.must(err)
	for _, e := range list.Items {
		if e.Source.Component == f.driver && e.Reason != reason {
			f.Errorf("event about %s %s: %s: %s", e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Reason, e.Message)
		}
	}
}
