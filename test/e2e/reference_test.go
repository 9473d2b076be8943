// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"debug/buildinfo"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// factsFile has one fact about a sidecar per line: the sidecar, the kind of the fact, a name, and more about it.
//
//	csi-attacher version github.com/kubernetes-csi/external-attacher/v4 v4.13.0
//	csi-attacher flag worker-threads 10       (- is the zero value, which --help does not print)
//	csi-attacher gate ReleaseLeaderElectionOnExit ALPHA false
//	csi-attacher library-gate WatchList -     (of k8s.io/apiserver and k8s.io/component-base)
//	csi-attacher metric workqueue_depth gauge name
//	csi-attacher event LeaderElection Normal
const factsFile = "../reference/facts.txt"

// references are the sidecars, and the module in test/ from which each is built.
var references = map[string]string{
	"csi-provisioner": "reference", "csi-attacher": "reference", "csi-resizer": "reference", "csi-snapshotter": "snapshotcontroller",
}

// TestReferenceFacts compares the facts about the sidecars with the sidecars themselves, or writes them when UPDATE is set. Flags and
// gates are those of --help, gates and events those of the source, and metrics those that a sidecar serves after some work. The
// tables of docs/compatibility.md are generated from the facts.
//
//	KUBETEST=real UPDATE=1 go test -run TestReferenceFacts ./test/e2e && make generate
func TestReferenceFacts(t *testing.T) {
	t.Parallel()
	kubetest.NeedReal(t)
	var facts []string
	metrics := servedByReferences(t)
	for name, module := range references {
		path := reference(t, name)
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		facts = append(facts, fmt.Sprintf("%s version %s %s", name, info.Main.Path, info.Main.Version))
		source := parseSource(t, filepath.Join("..", module), info.Path)
		gates := source.gates(t)
		for _, fact := range slices.Concat(helpFacts(t, path, gates), gates, source.events(t), metrics[name]) {
			facts = append(facts, name+" "+fact)
		}
	}
	slices.Sort(facts)
	text := strings.Join(slices.Compact(facts), "\n") + "\n"
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(factsFile, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	recorded, err := os.ReadFile(factsFile)
	if err != nil {
		t.Fatal(err)
	}
	was := strings.Split(string(recorded), "\n")
	for _, fact := range facts {
		if !slices.Contains(was, fact) {
			t.Errorf("%s does not have: %s", factsFile, fact)
		}
	}
	for _, fact := range was {
		if fact != "" && !slices.Contains(facts, fact) {
			t.Errorf("%s has, and the sidecar has not: %s", factsFile, fact)
		}
	}
}

// reference returns the path of a sidecar, which is built unless the cache has it.
func reference(t *testing.T, name string) string {
	t.Helper()
	paths, err := kubetest.BuildReference(t.Context(), os.Stderr, name)
	if err != nil {
		t.Fatal(err)
	}
	return paths[0]
}

var (
	// helpFlag begins the help of a flag, by package flag or by pflag.
	helpFlag    = regexp.MustCompile(`^ +(?:-\w, )?--?([a-z][\w-]*)(?:[ \[]|$)`)
	helpDefault = regexp.MustCompile(`\(default "?(.*?)"?\)$`)
	helpGate    = regexp.MustCompile(`\b([A-Z]\w+)=true\|false \((\w+) - default=(\w+)\)`)
)

// helpFacts returns the flags of a sidecar with their defaults, and the gates of --feature-gates that are not its own.
func helpFacts(t *testing.T, path string, own []string) []string {
	t.Helper()
	help, _ := exec.CommandContext(t.Context(), path, "--help").CombinedOutput() // some exit with 2
	var facts []string
	name, value := "", "-"
	end := func() {
		if name != "" && name != "help" {
			facts = append(facts, "flag "+name+" "+value)
		}
		value = "-"
	}
	for line := range strings.Lines(string(help)) {
		line = strings.TrimRight(line, "\n")
		if m := helpFlag.FindStringSubmatch(line); m != nil {
			end()
			name = m[1]
		}
		if m := helpDefault.FindStringSubmatch(line); m != nil && m[1] != "" && m[1] != "map[]" {
			value = m[1]
		}
	}
	end()
	if len(facts) < 20 {
		t.Fatalf("%s --help has %d flags:\n%s", path, len(facts), help)
	}
	for _, m := range helpGate.FindAllStringSubmatch(string(help), -1) {
		gate := "gate " + m[1] + " "
		switch {
		case m[1] == "AllAlpha", m[1] == "AllBeta": // they also set its own
			facts = append(facts, gate+m[2]+" "+m[3])
		case !slices.ContainsFunc(own, func(fact string) bool { return strings.HasPrefix(fact, gate) }):
			facts = append(facts, "library-"+gate+"-")
		}
	}
	return facts
}

// referenceSource is the source of a sidecar, with the libraries that record its events.
type referenceSource struct {
	files     []*ast.File
	constants map[string]string // of all packages, by their names without the package
}

// sourceModules are parts of the paths of the packages that [parseSource] reads.
var sourceModules = []string{"/kubernetes-csi/external-", "/kubernetes-csi/csi-lib-utils/", "/sig-storage-lib-external-provisioner/",
	"k8s.io/client-go/tools/leaderelection/"}

// parseSource reads the packages of the program pkg in a module.
func parseSource(t *testing.T, module, pkg string) referenceSource {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{.ImportPath}} {{.Dir}} {{join .GoFiles \" \"}}", pkg)
	list.Dir = module
	out, err := list.Output()
	if err != nil {
		t.Fatalf("%v: %v", list.Args, err)
	}
	s := referenceSource{constants: map[string]string{}}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if !slices.ContainsFunc(sourceModules, func(part string) bool { return strings.Contains(fields[0]+"/", part) }) {
			continue
		}
		for _, name := range fields[2:] {
			file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(fields[1], name), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			s.files = append(s.files, file)
		}
	}
	for _, file := range s.files {
		ast.Inspect(file, func(n ast.Node) bool {
			if spec, ok := n.(*ast.ValueSpec); ok {
				for i, value := range spec.Values {
					if text, ok := stringOf(value); ok {
						s.constants[spec.Names[i].Name] = text
					}
				}
			}
			return true
		})
	}
	return s
}

func stringOf(e ast.Expr) (string, bool) {
	literal, ok := e.(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return "", false
	}
	text, err := strconv.Unquote(literal.Value)
	return text, err == nil
}

// nameOf returns the name of an identifier, without its package.
func nameOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

// text returns the value of a string literal or of a constant.
func (s referenceSource) text(t *testing.T, e ast.Expr) string {
	t.Helper()
	if text, ok := stringOf(e); ok {
		return text
	}
	text := s.constants[nameOf(e)]
	if text == "" {
		t.Errorf("%T %q is neither a string nor a constant", e, nameOf(e))
	}
	return text
}

// gates returns the gates that the source adds to the default ones.
func (s referenceSource) gates(t *testing.T) []string {
	t.Helper()
	var facts []string
	for _, file := range s.files {
		ast.Inspect(file, func(n ast.Node) bool {
			gate, ok := n.(*ast.KeyValueExpr)
			if !ok {
				return true
			}
			spec, ok := gate.Value.(*ast.CompositeLit)
			if !ok || spec.Type != nil || file.Name.Name != "features" {
				return true
			}
			fields := map[string]string{}
			for _, e := range spec.Elts {
				field := e.(*ast.KeyValueExpr)
				fields[nameOf(field.Key)] = nameOf(field.Value)
			}
			stage := strings.ToUpper(fields["PreRelease"])
			facts = append(facts, fmt.Sprintf("gate %s %s %s", s.text(t, gate.Key), stage, fields["Default"]))
			return false
		})
	}
	if len(facts) == 0 {
		t.Error("no gates were found in the source")
	}
	return facts
}

// events returns the reasons of the events that the source records: the argument after the type of the event.
func (s referenceSource) events(t *testing.T) []string {
	t.Helper()
	var facts []string
	found, used := 0, 0
	for _, file := range s.files {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr:
				if strings.HasPrefix(n.Sel.Name, "EventType") {
					found++
				}
			case *ast.CallExpr:
				for i, arg := range n.Args {
					if kind, ok := strings.CutPrefix(nameOf(arg), "EventType"); ok && i+1 < len(n.Args) {
						used++
						facts = append(facts, "event "+s.text(t, n.Args[i+1])+" "+kind)
					}
				}
			}
			return true
		})
	}
	if found != used || len(facts) == 0 {
		t.Errorf("%d types of events in the source, %d of them arguments", found, used)
	}
	return facts
}

// families are prefixes of metrics of libraries. All metrics with one of them are one fact.
var families = []string{"aggregator_", "apiserver_", "go_", "process_", "promhttp_", "rest_client_"}

// servedByReferences returns the metrics of the sidecars after they have provisioned, attached, expanded, modified, snapshotted and
// deleted a volume, each with a failed attempt.
func servedByReferences(t *testing.T) map[string][]string {
	t.Helper()
	e := newEnv(t, csitest.Config{Expansion: resizable.Expansion, Controller: append(slices.Clone(resizable.Controller),
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT, csi.ControllerServiceCapability_RPC_GET_CAPACITY)}, 1)
	kubetest.InstallCRDs(t, e.cp)
	for _, method := range []string{"CreateVolume", "DeleteVolume", publish, unpublish, expandVolume, modifyVolume, "CreateSnapshot"} {
		e.plugin.Next(method, csitest.Fail(codes.Internal, "first attempt"))
	}
	endpoints := map[string]string{}
	for name := range references {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		e.must(err)
		endpoints[name] = listener.Addr().String()
		e.must(listener.Close())
		args := slices.Concat([]string{"--kubeconfig=" + e.cp.Kubeconfig(), "--csi-address=" + e.plugin.Address(),
			"--leader-election-namespace=" + e.ns, "--http-endpoint=" + endpoints[name]}, quick, election)
		if name == "csi-provisioner" {
			args = append(args, "--enable-capacity", "--capacity-ownerref-level=-1")
		}
		cmd := exec.Command(reference(t, name), args...)
		cmd.Env = []string{"NAMESPACE=" + e.ns}
		e.start(cmd)
	}

	e.claim("c", e.expandableClass())
	volume := e.bound("c")
	e.attach("a", volume, e.nodes[0])
	e.attached(1)
	fast := e.attributesClass("fast")
	e.request("c", "2Gi", fast)
	e.expanded("c", "2Gi")
	e.modified("c", fast)
	e.snapshotClass()
	e.snapshotContent("s")
	e.snapshotReady("s")
	e.detach("a")
	e.attached(0)
	e.must(e.snapshots().VolumeSnapshotContents().Delete(t.Context(), e.ns+"-s", metav1.DeleteOptions{}))
	e.deleteClaim("c")
	e.eventually("the volume is deleted", func(ctx context.Context) error {
		volumes, err := e.volumes(ctx)
		if len(volumes) > 0 {
			err = fmt.Errorf("%s is there", volumes[0].Name)
		}
		return err
	})

	// The last metric that a sidecar begins to serve.
	last := map[string]string{"csi-provisioner": "controller_persistentvolume_delete_total "}
	facts := map[string][]string{}
	for name, endpoint := range endpoints {
		want := "metric " + cmp.Or(last[name], "csi_sidecar_operations_seconds ")
		e.eventually(name+" serves "+want, func(ctx context.Context) error {
			var err error
			facts[name], err = metricsOf(ctx, endpoint)
			if err == nil && !slices.ContainsFunc(facts[name], func(fact string) bool { return strings.HasPrefix(fact, want) }) {
				err = fmt.Errorf("it serves %v", facts[name])
			}
			return err
		})
	}
	return facts
}

// metricsOf returns the metrics that an endpoint serves.
func metricsOf(ctx context.Context, endpoint string) ([]string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+endpoint+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	served, err := parser.TextToMetricFamilies(response.Body)
	if err != nil {
		return nil, err
	}
	var facts []string
	for name, metric := range served {
		if i := slices.IndexFunc(families, func(prefix string) bool { return strings.HasPrefix(name, prefix) }); i >= 0 {
			facts = append(facts, "metric "+families[i]+"* several")
			continue
		}
		labels := map[string]bool{}
		for _, m := range metric.Metric {
			for _, label := range m.Label {
				labels[label.GetName()] = true
			}
		}
		facts = append(facts, strings.TrimSpace(fmt.Sprintf("metric %s %s %s", name, strings.ToLower(metric.GetType().String()),
			strings.Join(slices.Sorted(maps.Keys(labels)), ","))))
	}
	return facts, nil
}
