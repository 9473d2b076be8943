// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package layout checks the rules about the structure and the language of the repository.
package layout

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/storage-controller/storage-controller"

// maxBinary is the size that the released program must stay below, in bytes: less
// than half of the programs that it replaces. A text/template in the program, such as one of cobra, adds 20 MB.
const maxBinary = 45_500_000

type pkg struct {
	ImportPath string
	Doc        string // first sentence of the package comment
	Imports    []string
}

// packages is those of the product, without tests.
func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports,Doc", module+"/...")
	cmd.Dir = "../.."
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var all []pkg
	for decoder := json.NewDecoder(out); ; {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	return all
}

// allowed is what a package of this module may import of it, by their paths in it.
var allowed = map[string][]string{
	"csiclient":         {"internal/migration", "internal/pressure"},
	"csiclient/csitest": {},
	"election":          {},
	"metrics":           {"internal/serving"},
	"internal/tools/explain": {
		"attacher", "election", "nodecontroller", "nodecontroller/nodecleanup", "provisioner", "internal/finalizers",
		"internal/kube", "internal/migration",
		"internal/topology", "internal/volumerules", "internal/tools/apiread", "internal/tools/clock", "internal/tools/finding",
		"internal/tools/statusz", "resizer",
		"snapshotter", "topolvm",
	},
	"internal/tools/audit": {
		"csiclient", "internal/finalizers", "internal/kube", "internal/migration", "internal/tools/apiread", "internal/tools/finding",
		"internal/workloop", "topolvm",
	},
	"internal/tools/doctor": {
		"csiclient", "internal/kube", "internal/migration", "internal/rbac", "internal/topology", "internal/volumerules",
		"internal/tools/apiread", "internal/tools/clock", "internal/tools/finding", "internal/tools/migrate", "nodecontroller/nodecleanup",
	},
	"internal/tools/apiread": {"internal/kube", "internal/tools/clock", "internal/tools/finding"},
	"internal/tools/clock":   {},
	"internal/tools/finding": {"csiclient"},
	"internal/finalizers":    {"election", "internal/kube"},
	"internal/intent":        {},
	"internal/keylock":       {},
	"internal/kube":          {"internal/migration"},
	"internal/kubetest":      {"test/simulation/apiserver"},
	"internal/claimloop":     {"internal/kube", "internal/workloop"},
	"internal/claimtest":     {"internal/claimloop", "internal/kube", "internal/kubetest", "internal/workloop"},
	"internal/looptest": {
		"csiclient", "csiclient/csitest", "election", "internal/kube", "internal/kubetest", "internal/workloop",
	},
	"internal/tools/migrate": {"internal/rbac"},
	"internal/volumerules":   {"internal/kube"},
	"internal/pressure":      {"election"},
	"internal/workloop":      {"election", "internal/intent", "internal/pressure"},
	"internal/tools/statusz": {"csiclient", "election", "internal/pressure", "internal/tools/doctor", "internal/workloop"},
	"internal/migration":     {},
	"internal/topology":      {},
	"internal/rbac":          {"deploy/rbac"},
	"deploy/rbac":            {},
	"internal/tracing":       {},
	"internal/serving":       {},
	"capacity":               {"csiclient", "election", "internal/kube", "internal/pressure", "internal/topology", "internal/workloop"},
	"nodecontroller": {
		"election", "metrics", "internal/claimloop", "internal/keylock", "internal/kube", "internal/serving", "internal/workloop",
		"nodecontroller/nodecleanup", "nodecontroller/pvcfinalizer", "nodecontroller/resizenudge", "nodecontroller/webhook",
		"topolvm", // the names of its driver
	},
	"nodecontroller/nodecleanup":  {"election", "internal/keylock", "internal/kube", "internal/workloop"},
	"nodecontroller/pvcfinalizer": {"election", "internal/claimloop", "internal/kube"},
	"nodecontroller/resizenudge":  {"internal/claimloop", "internal/kube"},
	"nodecontroller/webhook":      {"internal/kube", "internal/serving"},
	"provisioner": {
		"csiclient", "election", "metrics", "internal/keylock", "internal/kube", "internal/migration", "internal/topology",
		"internal/intent", "internal/pressure", "internal/tracing", "internal/volumerules", "internal/workloop",
	},
	"attacher": {
		"csiclient", "election", "metrics", "internal/keylock", "internal/kube", "internal/migration", "internal/tracing",
		"internal/intent", "internal/pressure", "internal/volumerules", "internal/workloop",
	},
	"resizer": {
		"csiclient", "election", "metrics", "internal/keylock", "internal/kube", "internal/migration", "internal/tracing",
		"internal/intent", "internal/pressure", "internal/volumerules", "internal/workloop",
	},
	"snapshotter": {
		"csiclient", "election", "metrics", "internal/keylock", "internal/kube", "internal/tracing", "internal/volumerules",
		"internal/intent", "internal/pressure", "internal/workloop",
	},
	"topolvm":             {"internal/keylock", "internal/kube", "nodecontroller/nodecleanup"},
	"topolvm/topolvmtest": {"internal/kubetest", "topolvm"},

	"internal/settings": {"csiclient", "election", "internal/serving"},
	"internal/app": {
		"attacher", "capacity", "csiclient", "election", "metrics", "nodecontroller", "nodecontroller/nodecleanup",
		"nodecontroller/pvcfinalizer",
		"provisioner", "resizer", "internal/keylock", "internal/kube", "internal/rbac", "internal/serving", "internal/settings",
		"internal/tools/audit", "internal/tools/doctor", "internal/tools/finding", "internal/tools/statusz",
		"internal/tracing", "internal/workloop", "snapshotter", "topolvm",
	},
	"cmd/storage-controller": {
		"csiclient", "election", "nodecontroller", "nodecontroller/nodecleanup", "provisioner", "internal/app", "internal/kube",
		"internal/rbac", "internal/settings",
		"internal/tools/apiread", "internal/tools/audit", "internal/tools/doctor", "internal/tools/explain", "internal/tools/finding",
		"internal/tools/migrate",
		"internal/tools/statusz",
		"internal/workloop", "topolvm",
	},
	"test/bench":      {"csiclient/csitest", "internal/kubetest"},
	"test/browser":    {},
	"test/defects":    {},
	"test/demo":       {"internal/kubetest", "test/simulation/apiserver", "test/simulation/cluster"},
	"test/hostdriver": {},
	"test/matrix":     {"internal/kubetest"},

	"test/simulation": {
		"attacher", "csiclient", "csiclient/csitest", "internal/app", "internal/intent", "provisioner", "resizer", "snapshotter",
		"internal/workloop",
		"internal/kube", "nodecontroller", "nodecontroller/nodecleanup", "test/simulation/apiserver", "test/simulation/cluster",
		"topolvm",
	},
	"test/simulation/apiserver": {},
	"test/simulation/cluster": {
		"nodecontroller/nodecleanup", "snapshotter", "test/simulation/apiserver", "topolvm", "topolvm/topolvmtest",
	},
	"test/simulation/mutations": {},
}

// confined is who may import a third party, by the begin of its path. A package
// that is named twice has to keep to the longer begin.
var confined = map[string][]string{
	"github.com/spf13/cobra": {"cmd/storage-controller"},
	"github.com/spf13/pflag": {
		"cmd/storage-controller", "internal/app", "internal/settings", "internal/workloop", "attacher", "capacity", "nodecontroller",
		"nodecontroller/nodecleanup", "provisioner", "resizer", "snapshotter", "test/simulation",
	},
	"github.com/spf13/viper":  {"internal/settings"},
	"go.uber.org/zap":         {"internal/app"},
	"github.com/go-logr/zapr": {"internal/app"},
	"html/template":           {}, // with them the linker keeps all methods of all clients, 23 MB
	"text/template":           {},
	"k8s.io/kubernetes":       {},
	"k8s.io/apiserver":        {},
	"k8s.io/component-base":   {},
	"sigs.k8s.io/controller-": {},
	"go.yaml.in/yaml":         {"internal/tools/migrate"},
	"github.com/rogpeppe/":    {"internal/tools/migrate"},
	"google.golang.org/grpc": {
		"internal/tools/audit", "csiclient", "csiclient/csitest", "internal/looptest", "provisioner", "attacher",
		"capacity", "resizer", "snapshotter", "test/bench", "test/hostdriver", "test/simulation", "topolvm", "internal/app",
		"internal/pressure",
	},
	"k8s.io/client-go": {
		"cmd/storage-controller", "election", "metrics", "internal/app", "internal/tools/apiread", "internal/tools/audit",
		"internal/tools/doctor",
		"internal/tools/explain", "internal/tools/statusz", "internal/kube", "internal/kubetest", "internal/looptest", "internal/rbac",
		"internal/serving", "internal/workloop", "provisioner", "attacher", "capacity", "nodecontroller", "nodecontroller/nodecleanup",
		"nodecontroller/pvcfinalizer", "nodecontroller/resizenudge", "nodecontroller/webhook",
		"resizer", "snapshotter", "internal/claimloop", "internal/claimtest", "test/bench", "test/demo",
		"test/simulation/apiserver", "test/simulation/cluster", "topolvm", "topolvm/topolvmtest",
	},
	"k8s.io/csi-translation-lib":    {"internal/migration"},
	"go.opentelemetry.io/":          {"csiclient", "internal/tracing"},
	"github.com/kubernetes-csi/csi": {"csiclient"},
	"github.com/kubernetes-csi/ext": {
		"internal/app", "internal/tools/explain", "internal/volumerules", "provisioner", "snapshotter", "test/simulation",
		"test/simulation/cluster",
	},
}

func TestImportsKeepToThePicture(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range packages(t) {
		name := strings.TrimPrefix(p.ImportPath, module+"/")
		may, known := allowed[name]
		seen[name] = true
		if !known && len(p.Imports) > 0 {
			t.Errorf("package %s is not in the picture: say in this test what it may import", name)
			continue
		}
		for _, i := range p.Imports {
			if of, ours := strings.CutPrefix(i, module+"/"); ours && !slices.Contains(may, of) {
				t.Errorf("%s imports %s", name, of)
			}
			for begin, who := range confined {
				if strings.HasPrefix(i, begin) && !slices.Contains(who, name) {
					t.Errorf("%s imports %s", name, i)
				}
			}
		}
	}
	for name := range allowed {
		if !seen[name] {
			t.Errorf("package %s is in the picture and does not exist", name)
		}
	}
}

func TestBinaryStaysSmall(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the program, which -short excludes")
	}
	path := filepath.Join(t.TempDir(), "storage-controller")
	cmd := exec.Command("make", "build", "BIN="+filepath.Dir(path))
	cmd.Dir = "../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", info.Size())
	if info.Size() >= maxBinary {
		t.Errorf("the program has %d bytes, more than %d: does a new dependency call methods by their names, which keeps the linker "+
			"from dropping unused code?", info.Size(), maxBinary)
	}
}
