// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
)

const notesFile = "NOTES.txt"

// templates is what the templates of a chart become, by their paths. The values are held
// against the schema of the chart.
func templates(dir, release, namespace string, files []string) (map[string]string, error) {
	c, err := loader.Load(dir)
	if err != nil {
		return nil, fmt.Errorf("chart %s: %w", dir, err)
	}
	values, err := valuesOf(files)
	if err != nil {
		return nil, err
	}
	return renderWith(c, release, namespace, values)
}

func renderWith(c *chart.Chart, release, namespace string, values chartutil.Values) (map[string]string, error) {
	options := chartutil.ReleaseOptions{Name: release, Namespace: namespace, Revision: 1, IsInstall: true}
	if err := chartutil.ProcessDependenciesWithMerge(c, values); err != nil {
		return nil, fmt.Errorf("dependencies of the chart %s: %w", c.Name(), err)
	}
	merged, err := chartutil.ToRenderValues(c, values, options, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, fmt.Errorf("values of the chart %s: %w", c.Name(), err)
	}
	files, err := engine.Engine{Strict: true}.Render(c, merged)
	if err != nil {
		return nil, fmt.Errorf("templates of the chart %s: %w", c.Name(), err)
	}
	return files, nil
}

// valuesOf merges files of values; a later one wins.
func valuesOf(files []string) (chartutil.Values, error) {
	all := chartutil.Values{}
	for _, file := range files {
		values, err := chartutil.ReadValuesFile(file)
		if err != nil {
			return nil, fmt.Errorf("values %s: %w", file, err)
		}
		all = chartutil.CoalesceTables(values, all)
	}
	return all, nil
}

// renderChart writes the objects, as "helm template" does.
func renderChart(dir, release, namespace string, files []string, out io.Writer) error {
	rendered, err := templates(dir, release, namespace, files)
	if err != nil {
		return err
	}
	for _, path := range slices.Sorted(maps.Keys(rendered)) {
		if filepath.Base(path) == notesFile || strings.TrimSpace(rendered[path]) == "" {
			continue
		}
		if _, err := fmt.Fprintf(out, "---\n# Source: %s\n%s\n", path, rendered[path]); err != nil {
			return err
		}
	}
	return nil
}

// chartNotes writes what a user is told after an installation.
func chartNotes(dir, release, namespace string, files []string, out io.Writer) error {
	rendered, err := templates(dir, release, namespace, files)
	if err != nil {
		return err
	}
	for path, text := range rendered {
		if filepath.Base(path) == notesFile {
			_, err := io.WriteString(out, text)
			return err
		}
	}
	return fmt.Errorf("chart %s has no %s", dir, notesFile)
}

// lintChart is "helm lint --strict".
func lintChart(dir string, files []string, out io.Writer) error {
	values, err := valuesOf(files)
	if err != nil {
		return err
	}
	result := lint.AllWithKubeVersion(dir, values, "default", nil)
	var errs []error
	for _, m := range result.Messages {
		if m.Severity >= support.WarningSev {
			errs = append(errs, errors.New(m.Error()))
			continue
		}
		fmt.Fprintln(out, m.Error())
	}
	return errors.Join(errs...)
}
