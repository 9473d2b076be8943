// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
)

// writePage replaces the parts of the page that were measured. Without a page it does nothing.
func (c *comparison) writePage(page string) error {
	text, err := readPage(page)
	if page == "" || err != nil {
		return err
	}
	for part, measured := range c.parts() {
		text, _ = replacePart(text, part, measured)
	}
	return os.WriteFile(page, []byte(text), 0o644)
}

// readPage returns the text of a page, or an error if it lacks the markers of a part. Without a page it returns nothing.
func readPage(page string) (string, error) {
	if page == "" {
		return "", nil
	}
	data, err := os.ReadFile(page)
	if err != nil {
		return "", err
	}
	for _, part := range []string{"comparison", "changes", "memory", "pressure", "throttled", "failover"} {
		if _, err := replacePart(string(data), part, ""); err != nil {
			return "", fmt.Errorf("%s: %w", page, err)
		}
	}
	return string(data), nil
}

// replacePart replaces what stands in text between the markers of a part.
func replacePart(text, part, by string) (string, error) {
	begin, end := "<!-- "+part+": begin -->\n", "<!-- "+part+": end -->\n"
	before, rest, okBegin := strings.Cut(text, begin)
	_, after, okEnd := strings.Cut(rest, end)
	if !okBegin || !okEnd {
		return "", fmt.Errorf("it lacks the lines %q and %q", strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	return before + begin + by + end + after, nil
}

// table prints c for people, as the page has it.
func (c *comparison) table(out io.Writer) {
	parts := c.parts()
	for _, part := range slices.Sorted(maps.Keys(parts)) {
		fmt.Fprintln(out, parts[part])
	}
}

// parts renders what was measured, by the name of the part of the page.
func (c *comparison) parts() map[string]string {
	parts := map[string]string{}
	if len(c.Pairs) > 0 {
		parts["comparison"] = c.rates()
	}
	if len(c.Changes) > 0 {
		parts["changes"] = c.changes()
	}
	if len(c.Footprints) > 0 {
		parts["memory"] = c.memory()
	}
	if c.Pressure != nil {
		parts["pressure"] = c.pressure()
	}
	if c.Throttled != nil {
		parts["throttled"] = c.throttled()
	}
	if c.Failover != nil {
		parts["failover"] = c.failover()
	}
	return parts
}

// conditions describes what the numbers depend on.
func (c *comparison) conditions() string {
	var b strings.Builder
	for _, s := range c.Sides {
		fmt.Fprintf(&b, "- %s, `%s`\n", s.Versions, s.Flags)
	}
	fmt.Fprintf(&b, "- %s, Kubernetes %s, %s\n\n", c.Date, c.Kubernetes, c.Machine)
	return b.String()
}

// columns are the measured values of a phase with n volumes.
var columns = []struct {
	title string
	of    func(p phase, n float64) float64
}{
	{"volumes/s", func(p phase, _ float64) float64 { return p.VolumesPerSecond }},
	{"CPU ms: controllers", func(p phase, n float64) float64 { return p.CPUSeconds * 1000 / n }},
	{"kube-apiserver", func(p phase, n float64) float64 { return p.APIServerSeconds * 1000 / n }},
	{"etcd", func(p phase, n float64) float64 { return p.EtcdSeconds * 1000 / n }},
	{"API requests", func(p phase, n float64) float64 { return float64(sum(p.Requests)) / n }},
}

// rates renders the rates and costs of the phases, and the memory of the same runs.
func (c *comparison) rates() string {
	var b strings.Builder
	c.phases(&b, c.Pairs, func(r *results) []phase { return append(slices.Clone(r.Phases), r.life()) })
	fmt.Fprintf(&b, "\n| memory | %s MiB | %s MiB | ratio |\n|---|---|---|---|\n", c.Sides[reference].Name, c.Sides[ours].Name)
	for _, m := range []struct {
		title string
		of    func(*results) phase
	}{
		{"idle", func(r *results) phase { return r.Idle }},
		{fmt.Sprintf("after %d volumes", c.Pairs[0][ours].Volumes), func(r *results) phase { return r.Phases[len(r.Phases)-1] }},
	} {
		theirs, own, ratios := medians(c.Pairs, func(r *results) float64 { return float64(m.of(r).ResidentBytes) / (1 << 20) })
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", m.title, number(theirs), number(own), withRange(ratios))
	}
	c.requests(&b, c.Pairs[0], func(p phase) bool { return p.Name != created })
	return b.String()
}

// changing are the phases that change volumes.
var changing = []string{"expand", "modify", "snapshot", "delete-snapshot"}

// changes renders the rates and costs of the phases that change volumes.
func (c *comparison) changes() string {
	var b strings.Builder
	changes := func(p phase) bool { return slices.Contains(changing, p.Name) }
	c.phases(&b, c.Changes, func(r *results) []phase {
		return slices.DeleteFunc(slices.Clone(r.Phases), func(p phase) bool { return !changes(p) })
	})
	c.requests(&b, c.Changes[0], changes)
	return b.String()
}

// phases renders the conditions of pairs, and the rates and costs of their phases.
func (c *comparison) phases(b *strings.Builder, pairs [][2]*results, of func(*results) []phase) {
	first := pairs[0][ours]
	fmt.Fprintf(b, "%d volumes, %d nodes, %s per CSI call, %d volumes of other drivers. Pairs of runs: %d. Medians of the "+
		"runs, and of the ratios of the pairs, with the smallest and the largest ratio. CPU and API requests are per volume:\n\n",
		first.Volumes, first.Nodes, first.Latency, first.Foreign, len(pairs))
	b.WriteString(c.conditions())
	b.WriteString("| phase | |")
	for _, col := range columns {
		b.WriteString(" " + col.title + " |")
	}
	b.WriteString("\n|---|---|" + strings.Repeat("---|", len(columns)) + "\n")
	for i := range of(first) {
		c.rows(b, pairs, func(r *results) phase { return of(r)[i] })
	}
}

// requests renders the API requests of the phases of a pair that are shown.
func (c *comparison) requests(b *strings.Builder, pair [2]*results, shown func(phase) bool) {
	b.WriteString("\nAPI requests per volume:\n\n")
	for s, side := range c.Sides {
		for _, p := range pair[s].Phases {
			if shown(p) {
				fmt.Fprintf(b, "- %s, %s: %s\n", side.Name, p.Name, frequent(p.Requests, pair[s].Volumes))
			}
		}
	}
}

// rows renders one phase: each side, and the ratio.
func (c *comparison) rows(b *strings.Builder, pairs [][2]*results, of func(*results) phase) {
	lines := [3]string{c.Sides[reference].Name, c.Sides[ours].Name, "ratio"}
	for _, col := range columns {
		theirs, own, ratios := medians(pairs, func(r *results) float64 { return col.of(of(r), float64(r.Volumes)) })
		for i, text := range []string{number(theirs), number(own), withRange(ratios)} {
			lines[i] += " | " + text
		}
	}
	name := of(pairs[0][ours]).Name
	for _, line := range lines {
		fmt.Fprintf(b, "| %s | %s |\n", name, line)
	}
}

// medians returns the median of a value on each side, and the ratios of the pairs. A ratio to zero is infinite, or NaN.
func medians(pairs [][2]*results, of func(*results) float64) (theirs, own float64, ratios []float64) {
	var values [3][]float64
	for _, pair := range pairs {
		a, b := of(pair[reference]), of(pair[ours])
		for i, v := range []float64{a, b, b / a} {
			values[i] = append(values[i], v)
		}
	}
	return median(values[0]), median(values[1]), values[2]
}

// withRange renders the median of values, and the smallest and the largest if there are several.
func withRange(values []float64) string {
	text := fmt.Sprintf("%.2f", median(values))
	if len(values) > 1 {
		text += fmt.Sprintf(" (%.2f to %.2f)", slices.Min(values), slices.Max(values))
	}
	return text
}

// median returns the middle of values, or the mean of the two in the middle.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}

// headroom is the factor from the measured peak to the memory limit.
const headroom = 1.25

// memory renders the footprints and the formula for a memory limit.
func (c *comparison) memory() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d nodes; each volume has a PVC and a VolumeAttachment. The peak includes the start of the processes:\n\n",
		memoryNodes)
	b.WriteString(c.conditions())
	theirs, own := c.Sides[reference].Name, c.Sides[ours].Name
	fmt.Fprintf(&b, "| own volumes | of other drivers | %s MiB | %s MiB | ratio | peak of %s | peak of %s | ratio |\n",
		theirs, own, theirs, own)
	b.WriteString("|---|---|---|---|---|---|---|---|\n")
	for _, f := range c.Footprints {
		fmt.Fprintf(&b, "| %d | %d |", f.Own, f.Foreign)
		for _, bytes := range [][2]int64{f.Resident, f.Peak} {
			theirs, own := float64(bytes[reference])/(1<<20), float64(bytes[ours])/(1<<20)
			fmt.Fprintf(&b, " %s | %s | %.2f |", number(theirs), number(own), own/theirs)
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "\nStart until a first volume is attached, and the CPU time of the processes five seconds later:\n\n"+
		"| own volumes | of other drivers | %s s | %s s | ratio | CPU s of %s | CPU s of %s | ratio |\n", theirs, own, theirs, own)
	b.WriteString("|---|---|---|---|---|---|---|---|\n")
	for _, f := range c.Footprints {
		fmt.Fprintf(&b, "| %d | %d |", f.Own, f.Foreign)
		for _, seconds := range [][2]float64{f.Start, f.CPU} {
			fmt.Fprintf(&b, " %.1f | %.1f | %.2f |", seconds[reference], seconds[ours], seconds[ours]/seconds[reference])
		}
		b.WriteString("\n")
	}
	base, each, foreign := limit(c.Footprints)
	fmt.Fprintf(&b, "\nMemory limit of %s, %.2f times the peak: %.0f MiB + %.1f KiB for each own volume", own, headroom,
		math.Ceil(base/(1<<20)), each/(1<<10))
	if slices.ContainsFunc(c.Footprints, func(f footprint) bool { return f.Foreign > 0 }) {
		fmt.Fprintf(&b, " + %.1f KiB for each volume of another driver", foreign/(1<<10))
	}
	b.WriteString(".\n")
	return b.String()
}

// limit returns the summands of a memory limit in bytes: that of the process, that of an own volume, and that
// of a volume of another driver. The first two are the line of least squares through the peaks.
func limit(footprints []footprint) (base, own, foreign float64) {
	var n, x, y, xx, xy float64
	for _, f := range footprints {
		if f.Foreign == 0 {
			v, peak := float64(f.Own), headroom*float64(f.Peak[ours])
			n, x, y, xx, xy = n+1, x+v, y+peak, xx+v*v, xy+v*peak
		}
	}
	own = (n*xy - x*y) / (n*xx - x*x)
	base = (y - own*x) / n
	for _, f := range footprints {
		if f.Foreign > 0 {
			foreign = max(0, (headroom*float64(f.Peak[ours])-base-own*float64(f.Own))/float64(f.Foreign))
		}
	}
	return base, own, foreign
}

// number renders a value with three digits.
func number(v float64) string {
	switch {
	case v >= 99.95:
		return fmt.Sprintf("%.0f", v)
	case v >= 9.995:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

func sum(counts map[string]int) (n int) {
	for _, c := range counts {
		n += c
	}
	return n
}

// frequent renders the counts that are at least one in twenty volumes.
func frequent(counts map[string]int, n int) string {
	counts = maps.Clone(counts)
	maps.DeleteFunc(counts, func(_ string, count int) bool { return count*20 < n })
	return per(counts, n)
}
