// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
)

// metricNames reads an expression per line and writes a line for each: the metrics that it
// selects, sorted, as NAME{LABEL,LABEL} with the labels that it matches.
func metricNames(in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	var errs []error
	for lines.Scan() {
		names, err := selected(lines.Text())
		if err != nil {
			errs = append(errs, fmt.Errorf("expression %q: %w", lines.Text(), err))
		}
		if _, err := fmt.Fprintln(out, strings.Join(names, " ")); err != nil {
			return err
		}
	}
	return errors.Join(append(errs, lines.Err())...)
}

func selected(expression string) ([]string, error) {
	tree, err := parser.NewParser(parser.Options{}).ParseExpr(expression)
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	var unnamed []string
	parser.Inspect(tree, func(node parser.Node, _ []parser.Node) error {
		selector, is := node.(*parser.VectorSelector)
		if !is {
			return nil
		}
		name := ""
		var matched []string
		for _, m := range selector.LabelMatchers {
			switch {
			case m.Name != model.MetricNameLabel:
				matched = append(matched, m.Name)
			case m.Type == labels.MatchEqual:
				name = m.Value
			}
		}
		if name == "" {
			unnamed = append(unnamed, selector.String())
		}
		slices.Sort(matched)
		names[name+"{"+strings.Join(matched, ",")+"}"] = true
		return nil
	})
	if len(unnamed) > 0 {
		return nil, fmt.Errorf("selects without the name of a metric: %v", unnamed)
	}
	return slices.Sorted(maps.Keys(names)), nil
}
