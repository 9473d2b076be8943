// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/storage-controller/storage-controller/internal/settings"
)

// referenceFacts are the facts about the sidecars, which TestReferenceFacts of test/e2e compares with the sidecars.
const referenceFacts = "../../test/reference/facts.txt"

// probeFacts are those about livenessprobe, which is not on the module proxy: its CHANGELOG has them, k8s.io/component-base those of
// the log.
const probeFacts = `
livenessprobe flag csi-address /run/csi/socket
livenessprobe flag health-port 9808
livenessprobe flag http-endpoint -
livenessprobe flag log-flush-frequency 5s
livenessprobe flag log-json-info-buffer-size -
livenessprobe flag log-json-split-stream -
livenessprobe flag log-text-info-buffer-size -
livenessprobe flag log-text-split-stream -
livenessprobe flag logging-format text
livenessprobe flag metrics-address -
livenessprobe flag metrics-path /metrics
livenessprobe flag probe-timeout 3s
livenessprobe flag v -
livenessprobe flag vmodule -
`

// differences are the facts that are different here: the sidecar (* means each) and the fact, its value here, and the reason.
const differences = `
* flag kube-api-qps | - | no limit: API Priority and Fairness protects the server
csi-provisioner flag kube-api-capacity-qps | - | no limit: API Priority and Fairness protects the server
csi-provisioner flag timeout | 15s | one default for all roles that call for volumes: fewer indeterminate calls
csi-resizer flag timeout | 15s | one default for all roles that call for volumes: fewer indeterminate calls
csi-attacher flag worker-threads | 100 | a worker mostly waits for the driver
csi-resizer flag resize-timeout | - | means --timeout
csi-resizer flag modify-timeout | - | means --timeout
* gate ReleaseLeaderElectionOnExit | accepted, no effect | the Lease is always released
* metric aggregator_* | - | of a library for API servers, which a sidecar does not use
* metric apiserver_* | - | of a library for API servers, which a sidecar does not use
* metric cardinality_enforcement_unexpected_categorizations_total | - | about k8s.io/component-base, which does not serve the metrics here
* metric disabled_metrics_total | - | about k8s.io/component-base, which does not serve the metrics here
* metric hidden_metrics_total | - | about k8s.io/component-base, which does not serve the metrics here
* metric registered_metrics_total | - | about k8s.io/component-base, which does not serve the metrics here
csi-provisioner metric promhttp_* | - | about the scrapes themselves
csi-resizer metric rest_client_* | - | not built; the API server's apiserver_flowcontrol_* have the requests and their delays
csi-provisioner event ProvisioningCleanupFailed | - | of a mode of the library that csi-provisioner does not use
csi-provisioner event VolumeDelete | - | VolumeFailedDelete if the volume is still attached after a minute
`

// zero is the value of a flag whose default is false, 0 or empty: --help does not print it.
const zero = "-"

// noEffect is what a feature gate is here that is accepted and has no effect.
const noEffect = "accepted, no effect"

// commandOf has the command here with the flags of a sidecar.
var commandOf = map[string]string{"csi-provisioner": "provision", "csi-attacher": "attach", "csi-resizer": "resize",
	"csi-snapshotter": "snapshot", "livenessprobe": "livenessprobe"}

// TestDocsCompatibility compares flags, feature gates, metrics and events with those of the sidecars, and the tables of the page with
// both, or writes them when UPDATE is set (make generate). A different value needs a reason in [differences].
func TestDocsCompatibility(t *testing.T) {
	c := newComparison(t)
	var tables strings.Builder
	tables.WriteString("<!-- sidecars: begin -->\n" +
		"These versions were built, run and compared; [differences.md](differences.md) has the differences in behavior.\n" +
		"*csi-\\** are the four of them, and *not set* means false, 0 or empty.\n\n")
	for _, f := range c.facts {
		if f.kind == "version" {
			if !strings.Contains(c.modules, f.name+" "+f.value+" ") {
				t.Errorf("%s has %s %s, which is not built any more", referenceFacts, f.name, f.value)
			}
			fmt.Fprintf(&tables, "- %s %s\n", f.sidecar, f.value)
		}
	}
	tables.WriteString("- livenessprobe v2.17.0 to v2.20.0, not built: its source is not on the module proxy. Its flags are those of its " +
		"CHANGELOG\n")
	c.table(&tables, "flag", "Flags", "flag | sidecar | default there")
	c.table(&tables, "gate", "Feature gates", "gate | sidecar | stage and default there")
	c.libraryGates(&tables)
	c.table(&tables, "metric", "Metrics", "metric | sidecar | type and labels there")
	c.table(&tables, "event", "Events", "reason | sidecar | type there")
	tables.WriteString("<!-- sidecars: end -->")
	for what, d := range c.differences {
		if !d.used {
			t.Errorf("no sidecar has what differences has: %s", what)
		}
	}
	const page = "../../docs/compatibility.md"
	have, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	part := regexp.MustCompile("(?s)<!-- sidecars: begin -->.*?<!-- sidecars: end -->")
	want := part.ReplaceAllLiteralString(string(have), tables.String())
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if string(have) != want || !part.Match(have) {
		t.Errorf("%s is stale, run make generate", page)
	}
}

// sidecarFact is a line of the facts. Its value is the default of a flag, the stage and default of a gate, or the type of a metric or
// event.
type sidecarFact struct{ sidecar, kind, name, value string }

// difference is the value here of a fact, and the reason.
type difference struct {
	here, reason string
	used         bool
}

// comparison compares the facts about the sidecars with the program.
type comparison struct {
	t           *testing.T
	facts       []sidecarFact
	modules     string                 // the files go.mod of the sidecars
	differences map[string]*difference // by sidecar, kind and name
	commands    map[string]*cobra.Command
	documented  map[string]string // types of metrics and events, of their pages
}

func newComparison(t *testing.T) *comparison {
	t.Helper()
	c := &comparison{t: t, differences: map[string]*difference{}, commands: commandTree(t), documented: map[string]string{}}
	read := func(path string) string {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	c.modules = read("../../test/reference/go.mod") + read("../../test/snapshotcontroller/go.mod")
	for line := range strings.Lines(read(referenceFacts) + strings.TrimSpace(probeFacts)) {
		part := strings.SplitN(strings.TrimSpace(line), " ", 4)
		if len(part) != 4 {
			t.Fatalf("%q is not a fact", line)
		}
		c.facts = append(c.facts, sidecarFact{part[0], part[1], part[2], part[3]})
	}
	for line := range strings.Lines(strings.TrimSpace(differences)) {
		part := strings.Split(strings.TrimSpace(line), " | ")
		if len(part) != 3 {
			t.Fatalf("%q is not a difference", line)
		}
		c.differences[part[0]] = &difference{here: part[1], reason: part[2]}
	}
	metrics := read("../../docs/metrics.md")
	for _, family := range regexp.MustCompile("`(\\w+\\*)`").FindAllStringSubmatch(metrics, -1) {
		c.documented[family[1]] = "several"
	}
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (\\w+) \\| (.*?) \\|").FindAllStringSubmatch(metrics, -1) {
		labels := strings.Split(strings.ReplaceAll(row[3], "`", ""), ", ")
		slices.Sort(labels)
		c.documented[row[1]] = strings.TrimSpace(row[2] + " " + strings.Join(labels, ","))
	}
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (Normal|Warning), ").FindAllStringSubmatch(read(referencePage), -1) {
		c.documented[row[1]] = row[2]
	}
	return c
}

// table writes the facts of a kind, with one row for the sidecars with the same fact.
func (c *comparison) table(b *strings.Builder, kind, title, head string) {
	c.t.Helper()
	type row struct{ name, there, here string }
	var rows []row
	sidecars := map[row][]string{}
	for _, f := range c.facts {
		if f.kind != kind {
			continue
		}
		r := row{name: f.name, there: code(f.value), here: c.here(f)}
		if f.value == zero {
			r.there = "not set"
		}
		if sidecars[r] == nil {
			rows = append(rows, r)
		}
		sidecars[r] = append(sidecars[r], f.sidecar)
	}
	slices.SortStableFunc(rows, func(a, b row) int { return strings.Compare(a.name, b.name) })
	fmt.Fprintf(b, "\n### %s\n\n| %s | here |\n|---|---|---|---|\n", title, head)
	for _, r := range rows {
		if r.name == "" || r.there == "" || r.here == "" {
			c.t.Errorf("a cell of %+v is empty", r)
		}
		name := r.name
		if kind == "flag" {
			name = "--" + name
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", name, listed(sidecars[r]), r.there, r.here)
	}
}

// here returns the cell about this program for a fact.
func (c *comparison) here(f sidecarFact) string {
	c.t.Helper()
	ours := c.ours(f)
	if ours == f.value {
		return "the same"
	}
	for _, sidecar := range []string{f.sidecar, "*"} {
		d := c.differences[sidecar+" "+f.kind+" "+f.name]
		if d == nil {
			continue
		}
		d.used = true
		if d.here != ours {
			c.t.Errorf("%v: differences has %q, but here it is %q", f, d.here, ours)
		}
		switch {
		case ours != zero:
			return code(ours) + ": " + d.reason
		case f.kind == "flag":
			return "not set: " + d.reason
		}
		return "none: " + d.reason
	}
	c.t.Errorf("%v: here it is %q. Make it the same, or add the reason to differences", f, ours)
	return ours
}

// ours returns what this program has instead of the value of a fact, [zero] if it has nothing.
func (c *comparison) ours(f sidecarFact) string {
	c.t.Helper()
	command := c.commands[commandOf[f.sidecar]]
	switch f.kind {
	case "flag":
		flag := command.Flags().Lookup(f.name)
		if flag == nil {
			c.t.Errorf("%s does not have --%s of %s", command.Name(), f.name, f.sidecar)
			return zero
		}
		value := strings.Trim(flag.DefValue, "[]")
		if value == "" || value == "0" || value == "0s" || value == "false" {
			return zero
		}
		return value
	case "gate":
		return c.gate(command, f.name)
	case "metric", "event":
		if typed := c.documented[f.name]; typed != "" {
			return typed
		}
	default:
		c.t.Fatalf("unknown kind of fact: %v", f)
	}
	return zero
}

// gate returns stage and default of a feature gate here, as --help has them.
func (c *comparison) gate(command *cobra.Command, name string) string {
	usage := command.Flags().Lookup("feature-gates").Usage
	if m := regexp.MustCompile(`\b` + name + `=true\|false \((\w+) - default=(\w+)\)`).FindStringSubmatch(usage); m != nil {
		return m[1] + " " + m[2]
	}
	if slices.Contains(settings.KnownGates(), name) {
		return noEffect
	}
	return zero
}

// libraryGates writes a row about the gates of the libraries of Kubernetes, which must be accepted.
func (c *comparison) libraryGates(b *strings.Builder) {
	c.t.Helper()
	var gates, sidecars []string
	for _, f := range c.facts {
		if f.kind != "library-gate" {
			continue
		}
		gates, sidecars = append(gates, f.name), append(sidecars, f.sidecar)
		if ours := c.gate(c.commands[commandOf[f.sidecar]], f.name); ours != noEffect {
			c.t.Errorf("%v: here it is %q, want %q", f, ours, noEffect)
		}
	}
	slices.Sort(gates)
	fmt.Fprintf(b, "| %d gates of k8s.io/apiserver and k8s.io/component-base | %s | of the library | "+
		"`%s`: nothing in a sidecar depends on them |\n", len(slices.Compact(gates)), listed(slices.Compact(sidecars)), noEffect)
}

// listed returns a list of sidecars, in short.
func listed(sidecars []string) string {
	return strings.Replace(strings.Join(sidecars, ", "), "csi-attacher, csi-provisioner, csi-resizer, csi-snapshotter", `csi-\*`, 1)
}

// code returns text in backquotes.
func code(text string) string { return "`" + text + "`" }
