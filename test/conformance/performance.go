// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// performance is the name of the driver files that have PerformanceTestOptions, and of the results with them.
const performance = "performance"

// The suites that measure. They skip StorageClasses with WaitForFirstConsumer.
const performanceSuites = "(volume-lifecycle|pvc-deletion)-performance"

// The metrics that the suites log.
const (
	provisionLatency = "PVC created until bound, average, s"
	provisionRate    = "PVCs divided by the longest of these times, 1/s"
	deletionTime     = "all PVCs and PVs deleted, s"
	deletionLatency  = "PVC deleted until PV deleted, %s, s"
)

var (
	provisioned = regexp.MustCompile(`Metrics to evaluate:[^}]*AvgLatency: \(time\.Duration\) (\d+),\s+Throughput: \(float64\) ([0-9.e+]+)`)
	deletedPV   = regexp.MustCompile(`Deleted PV \S+, PVC \S+ in (\S+)`)
	deletedAll  = regexp.MustCompile(`Deleted all PVC/PVs in (\S+)`)
)

// metrics returns the values that a specification has logged, by metric.
func metrics(output string) (map[string]float64, error) {
	values := map[string]float64{}
	if m := provisioned.FindStringSubmatch(output); m != nil {
		nanoseconds, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return nil, err
		}
		rate, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return nil, err
		}
		values[provisionLatency], values[provisionRate] = nanoseconds/1e9, rate
	}
	if m := deletedAll.FindStringSubmatch(output); m != nil {
		d, err := time.ParseDuration(m[1])
		if err != nil {
			return nil, err
		}
		values[deletionTime] = d.Seconds()
		var each []float64
		for _, m := range deletedPV.FindAllStringSubmatch(output, -1) {
			d, err := time.ParseDuration(m[1])
			if err != nil {
				return nil, err
			}
			each = append(each, d.Seconds())
		}
		if len(each) == 0 {
			return nil, errors.New("the time of no PV is logged")
		}
		slices.Sort(each)
		for _, p := range []int{50, 90, 99} {
			values[fmt.Sprintf(deletionLatency, fmt.Sprint("p", p))] = each[(len(each)*p+99)/100-1]
		}
	}
	if len(values) == 0 {
		return nil, errors.New("no metric is logged")
	}
	return values, nil
}

// measure runs the suites that measure and writes their part of the page after each run.
func (o options) measure() error {
	suites, err := o.suites(performance)
	if err != nil {
		return err
	}
	r := &results{binding: performance}
	var loads []string
	for run := range o.runs {
		for _, suite := range slices.Sorted(maps.Keys(suites)) {
			loads = append(loads, loadAverage())
			begin := time.Now()
			specs, err := o.runSuite(performance, suite, suites[suite])
			if err != nil {
				return err
			}
			r.specs = append(r.specs, specs...)
			fmt.Printf("%s run %d %s: %s in %v\n", time.Now().Format(time.TimeOnly), run+1, suite, summary(specs),
				time.Since(begin).Round(time.Second))
		}
		if err := verdict([]*results{r}); err != nil {
			return err
		}
		table, err := performanceTable(r.specs)
		if err != nil {
			return err
		}
		fmt.Print("\n" + table + "\n")
		if err := o.writePerformance(run+1, loads, table); err != nil {
			return err
		}
	}
	return nil
}

// loadAverage returns that of the last minute. The measurements of a machine that others use are worth little.
func loadAverage() string {
	text, _ := os.ReadFile("/proc/loadavg") // it is there on every Linux with /proc
	load, _, _ := strings.Cut(string(text), " ")
	return load
}

// performanceTable renders the medians of all runs, with the smallest and the largest value.
func performanceTable(specs []spec) (string, error) {
	suites := map[string]string{} // by metric
	values := map[string]map[string][]float64{}
	for _, s := range specs {
		of, err := metrics(s.output)
		if err != nil {
			return "", fmt.Errorf("%s of %s: %w", s.suite, s.side, err)
		}
		for metric, value := range of {
			if values[metric] == nil {
				suites[metric], values[metric] = s.suite, map[string][]float64{}
			}
			values[metric][s.side] = append(values[metric][s.side], value)
		}
	}
	var rows []string
	for metric, bySide := range values {
		row := fmt.Sprintf("| %s | %s |", suites[metric], metric)
		for _, side := range sides {
			row += " " + spread(bySide[side]) + " |"
		}
		rows = append(rows, row)
	}
	slices.Sort(rows)
	return fmt.Sprintf("| suite | | %s | %s |\n|---|---|---|---|\n%s\n", reference, ours, strings.Join(rows, "\n")), nil
}

// spread renders the median with the smallest and the largest value.
func spread(values []float64) string {
	if len(values) == 0 {
		return "not run"
	}
	slices.Sort(values)
	n := len(values)
	return fmt.Sprintf("%.3g (%.3g to %.3g)", (values[(n-1)/2]+values[n/2])/2, values[0], values[n-1])
}

// performancePart is the part of the page that --performance writes. A run without it keeps the part.
var performancePart = regexp.MustCompile(`(?s)<!-- performance: begin -->.*<!-- performance: end -->`)

// withPerformance returns a page with the given part, in its place or at its end.
func withPerformance(page, part string) string {
	if performancePart.MatchString(page) {
		page = performancePart.ReplaceAllLiteralString(page, part)
	} else {
		page = strings.TrimSpace(page) + "\n\n" + part
	}
	return strings.TrimSpace(page) + "\n"
}

// writePerformance writes the part of the page.
func (o options) writePerformance(runs int, loads []string, table string) error {
	if o.page == "" {
		return nil
	}
	facts, err := os.ReadFile(filepath.Join(dir, "state", "facts.md"))
	if err != nil {
		return err
	}
	text := fmt.Sprintf(`<!-- performance: begin -->
## Performance

Generated by %[1]smake conformance ARGS=--performance%[1]s: what two suites of Kubernetes log themselves.
Each creates 300 PVCs of 1 MiB with Immediate binding. pvc-deletion-performance also creates 300 pods without volumes, and
deletes them before the PVCs. The sides run one after the other; the controllers of the other side are idle.
Medians of %[2]d runs, with the smallest and the largest value:

%[3]s- load average of the machine before each suite: %[7]s
- peak memory in MiB: reference %[4]d, storage-controller %[5]d

%[6]s
volume-lifecycle-performance logs no percentiles. Its times begin with creationTimestamp, which has whole seconds, so that
each is up to a second too long. pvc-deletion-performance asks for each PV once a second; the percentiles are of the times
that it logs.
<!-- performance: end -->`, "`", runs, facts, peak("reference-csi-*"), peak("storage-controller"), table, strings.Join(loads, ", "))
	page, _ := os.ReadFile(filepath.Join(root, o.page)) // it may be a new one
	return os.WriteFile(filepath.Join(root, o.page), []byte(withPerformance(string(page), text)), 0o644)
}
