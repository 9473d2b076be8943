// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"debug/buildinfo"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// sidecarStory is a situation in which a volume or a snapshot can be lost, leak or stay out of reach. It is played with a sidecar
// and with storage-controller, and each gets a verdict.
type sidecarStory struct {
	name    string
	does    string // with a link to the report of a user, if there is one
	sidecar string
	flags   []string // of storage-controller; if does names them, the sidecar has none like them and is not run
	config  csitest.Config
	nodes   int
	play    func(s *side)
	end     func(s *side) verdict
	fails   bool // storage-controller fails, too, as its pages say
}

// verdict is the state in which a story has ended.
type verdict struct {
	state string
	good  bool
}

// storyPatience is the time after which a state that is not good is the end of a story.
const storyPatience = time.Minute

func (v verdict) String() string {
	if v.good || v.state == "" {
		return v.state
	}
	return fmt.Sprintf("**%s** after %.0f s", v.state, storyPatience.Seconds())
}

const besidePage = "../../docs/beside-the-sidecars.md"

// TestBesideTheSidecars plays the stories with storage-controller, and with the sidecars that the environment variable SIDECARS
// names. It compares the verdicts with docs/beside-the-sidecars.md, or writes that if UPDATE is set (make stories).
func TestBesideTheSidecars(t *testing.T) {
	t.Parallel()
	kubetest.NeedReal(t)
	verdicts := make([][2]verdict, len(sidecarStories)) // of the sidecar, and of storage-controller
	t.Run("story", func(t *testing.T) {
		for i, story := range sidecarStories {
			t.Run(story.name, func(t *testing.T) {
				t.Parallel()
				if sidecar := realSidecar(t, story.sidecar); sidecar != "" && !story.needsFlags() {
					t.Run(story.sidecar, func(t *testing.T) {
						t.Parallel()
						verdicts[i][0] = story.verdict(t, sidecar, storyPatience)
					})
				}
				t.Run("storage-controller", func(t *testing.T) {
					t.Parallel()
					limit := storyPatience
					if story.fails && os.Getenv("SIDECARS") == "" {
						limit = 5 * time.Second
					}
					v := story.verdict(t, "", limit)
					verdicts[i][1] = v
					if v.good == story.fails {
						t.Errorf("verdict after %v: %s", limit, v.state)
					}
				})
			})
		}
	})
	comparePage(t, verdicts)
}

// needsFlags reports whether the story is about flags that only storage-controller has.
func (s sidecarStory) needsFlags() bool {
	return slices.ContainsFunc(s.flags, func(flag string) bool { return strings.Contains(s.does, flag) })
}

// verdict plays the story and waits for its end. An empty path of the sidecar stands for storage-controller.
func (s sidecarStory) verdict(t *testing.T, sidecar string, limit time.Duration) verdict {
	side := &side{env: newEnv(t, s.config, s.nodes), sidecar: sidecar, flags: s.flags, killed: make(chan struct{})}
	kubetest.InstallCRDs(t, side.cp)
	s.play(side)
	var v verdict
	_ = wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, limit, true, func(context.Context) (bool, error) {
		v = s.end(side)
		return v.good, nil
	}) // the verdict says whether the time is over
	t.Logf("verdict: %s, good: %t", v.state, v.good)
	return v
}

// comparePage compares the page with the verdicts, or writes it if all stories ran. A verdict that is missing is that of the page.
func comparePage(t *testing.T, verdicts [][2]verdict) {
	page, err := os.ReadFile(besidePage)
	if err != nil {
		t.Fatal(err)
	}
	recorded := map[string][]string{} // the cells of a row, by the first one
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(strings.Trim(line, "| \n"), " | ")
		recorded[cells[0]] = cells
	}
	table, complete := "| story | situation | sidecar | its verdict | verdict of storage-controller |\n|---|---|---|---|---|\n", true
	for i, story := range sidecarStories {
		row := []string{"`" + story.name + "`", story.does, story.sidecar, verdicts[i][0].String(), verdicts[i][1].String()}
		if story.needsFlags() {
			row[3] = "has no such flag"
		}
		was := recorded[row[0]]
		for c := range row {
			if row[c] == "" && len(was) == len(row) {
				row[c], complete = was[c], false
			}
		}
		if !slices.Equal(row, was) && os.Getenv("UPDATE") == "" {
			t.Errorf("%s does not have the row %q: run make stories UPDATE=1", besidePage, row)
		}
		table += "| " + strings.Join(row, " | ") + " |\n"
	}
	if os.Getenv("SIDECARS") != "" {
		fmt.Printf("\n%s\n", table)
	}
	if os.Getenv("UPDATE") != "" && complete && !t.Failed() {
		if err := os.WriteFile(besidePage, []byte(besideText(t)+table), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// besideText returns the page before the table.
func besideText(t *testing.T) string {
	commit, err := exec.CommandContext(t.Context(), "git", "describe", "--tags", "--always", "--dirty").Output()
	if err != nil {
		t.Fatal(err)
	}
	version, err := kubetest.SelectedVersion()
	if err != nil {
		t.Fatal(err)
	}
	versions := []string{"storage-controller " + strings.TrimSpace(string(commit))}
	for _, name := range strings.Split(os.Getenv("SIDECARS"), ",") {
		info, err := buildinfo.ReadFile(reference(t, name))
		if err != nil {
			t.Fatal(err)
		}
		versions = append(versions, filepath.Base(info.Path)+" "+info.Main.Version)
	}
	return fmt.Sprintf(`# Beside the sidecars

Generated by `+"`make stories UPDATE=1`"+`. The stories are reports of users, and [differences](differences.md) that can cost data, leak
storage or block a pod. Each is played with a scripted CSI driver on a real kube-apiserver and kube-controller-manager: once with the
sidecar, built from its Go module, and once with `+"`storage-controller all`"+`. The flags are the defaults, except short retry intervals
and, for the sidecars, no limit of API requests. `+"`make stories STORY=NAME`"+` plays one story.

A verdict is the state of the driver and the API server, as the test reads it. A bad state is bold: it still held after %.0f s.

- %s, Kubernetes %s
- %s

`, storyPatience.Seconds(), time.Now().UTC().Format(time.DateOnly), version.Kubernetes, strings.Join(versions, ", "))
}

// side is one side of a story.
type side struct {
	*env
	sidecar string // path; empty: storage-controller
	flags   []string
	process *process // the latest one

	// resource is the one whose watch delivers nothing while late is held, and whose objects reads counts.
	resource string
	late     sync.Mutex
	reads    atomic.Int32

	killAfter string // the process is killed after its first PATCH of an object of this resource, and killed is closed
	dying     atomic.Bool
	killed    chan struct{}

	handle string // of the volume or the snapshot that the story is about
}

// launch starts the process behind a proxy.
func (s *side) launch() {
	s.t.Helper()
	cfg := s.account()
	if s.sidecar != "" {
		cfg = s.cp.Config()
	}
	args := append(slices.Clone(quick), "--kubeconfig="+kubetest.WriteKubeconfig(s.t, kubetest.Proxy(s.t, cfg, s.forward)))
	if s.sidecar == "" {
		s.process = s.run("all", append(args, s.flags...)...)
		return
	}
	args = append(args, "--csi-address="+s.plugin.Address(), "--kube-api-qps=1000", "--kube-api-burst=1000")
	s.process = s.start(exec.Command(s.sidecar, args...))
}

// forward is the hook of the proxy.
func (s *side) forward(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	object := func(resource string) bool { return resource != "" && strings.Contains(r.URL.Path, "/"+resource+"/") }
	switch {
	case r.URL.Query().Get("watch") != "" && s.resource != "" && strings.HasSuffix(r.URL.Path, "/"+s.resource):
		w = kubetest.GatedWriter{ResponseWriter: w, Gate: &s.late}
	case r.Method == http.MethodGet && object(s.resource):
		s.reads.Add(1)
	case r.Method == http.MethodPatch && object(s.killAfter) && s.dying.CompareAndSwap(false, true):
		pass.ServeHTTP(httptest.NewRecorder(), r)
		s.process.kill()
		close(s.killed)
		return
	}
	pass.ServeHTTP(w, r)
}
