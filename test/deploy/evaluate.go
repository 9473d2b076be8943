// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
)

// question is the input of evaluate: scraped metrics and expressions.
type question struct {
	Scrapes     []scrape
	Expressions []string
	Rules       []rule
	// Clocks are gauges that change with nothing but the time.
	Clocks []string
}

// scrape is the text of /metrics at a time, in seconds, with the labels that Prometheus
// gives to what it reads from there.
type scrape struct {
	At     int64
	Labels map[string]string
	Text   string
	// Again is how many more times the target is scraped, a minute apart, while metrics change as they did
	// in the minute before: see [line.goOn].
	Again int64
}

// rule is an alert: what it asks, and for how many seconds the answer has to be the same.
type rule struct {
	Expression string
	For        int64
}

// answer has, for each expression, its series at the time of the last scrape, and for each rule
// those with which it has fired at some time, all as text and without values.
type answer struct {
	Expressions, Rules [][]string
}

// evaluate asks the engine of Prometheus.
func evaluate(in io.Reader, out io.Writer) error {
	var q question
	if err := json.NewDecoder(in).Decode(&q); err != nil {
		return fmt.Errorf("reading what to evaluate: %w", err)
	}
	data, first, last, err := gathered(q)
	if err != nil {
		return err
	}
	engine := promql.NewEngine(promql.EngineOpts{
		MaxSamples: 1 << 20, Timeout: time.Minute, LookbackDelta: 5 * time.Minute, Parser: parser.NewParser(parser.Options{}),
	})
	a := answer{Expressions: [][]string{}, Rules: [][]string{}}
	for _, expression := range q.Expressions {
		series, err := data.ask(engine, rule{Expression: expression}, last, last)
		if err != nil {
			return fmt.Errorf("expression %q: %w", expression, err)
		}
		a.Expressions = append(a.Expressions, series)
	}
	for _, r := range q.Rules {
		series, err := data.ask(engine, r, first, last)
		if err != nil {
			return fmt.Errorf("expression %q: %w", r.Expression, err)
		}
		a.Rules = append(a.Rules, series)
	}
	return json.NewEncoder(out).Encode(a)
}

// step is the time between two evaluations of a rule, and between two scrapes that go on.
const step = time.Minute

// ask is the series that an expression has at every step of a time that is as long as the rule wants.
func (s series) ask(engine *promql.Engine, r rule, from, to time.Time) ([]string, error) {
	ctx := context.Background()
	query, err := engine.NewRangeQuery(ctx, s, nil, r.Expression, from, to, step)
	if err != nil {
		return nil, err
	}
	defer query.Close()
	result := query.Exec(ctx)
	if result.Err != nil {
		return nil, result.Err
	}
	if w := result.Warnings.AsErrors(); len(w) > 0 { // such as a rate of a gauge
		return nil, fmt.Errorf("warnings: %v", w)
	}
	matrix, err := result.Matrix()
	if err != nil {
		return nil, err
	}
	found := []string{}
	for _, of := range matrix {
		if lasts(of.Floats) >= time.Duration(r.For)*time.Second {
			found = append(found, of.Metric.String())
		}
	}
	slices.Sort(found)
	return found, nil
}

// lasts is the longest time in which no step is without a point.
func lasts(points []promql.FPoint) (longest time.Duration) {
	for i, since := 0, 0; i < len(points); i++ {
		if i > 0 && points[i].T-points[i-1].T > step.Milliseconds() {
			since = i
		}
		longest = max(longest, time.Duration(points[i].T-points[since].T)*time.Millisecond)
	}
	return longest
}

// series is what was scraped: a storage that is small enough to be searched from end to end.
type series map[string]*line

type line struct {
	labels  labels.Labels
	samples []chunks.Sample
}

// gathered sorts scrapes by series, and tells when the first and the last of them were.
func gathered(q question) (all series, first, last time.Time, err error) {
	all = series{}
	for _, s := range q.Scrapes {
		at := time.Unix(s.At, 0)
		if first.IsZero() || at.Before(first) {
			first = at
		}
		if end := at.Add(time.Duration(s.Again) * step); end.After(last) {
			last = end
		}
		text := expfmt.NewTextParser(model.UTF8Validation)
		families, err := text.TextToMetricFamilies(strings.NewReader(s.Text))
		if err != nil {
			return nil, first, last, fmt.Errorf("the scrape at %d: %w", s.At, err)
		}
		for _, family := range families {
			vector, err := expfmt.ExtractSamples(&expfmt.DecodeOptions{Timestamp: model.TimeFromUnix(s.At)}, family)
			if err != nil {
				return nil, first, last, fmt.Errorf("the metric %s at %d: %w", family.GetName(), s.At, err)
			}
			for _, sample := range vector {
				l := all.add(sample, s.Labels)
				if s.Again > 0 {
					l.goOn(s.Again, l.pace(family.GetType(), q.Clocks))
				}
			}
		}
	}
	return all, first, last, nil
}

func (s series) add(sample *model.Sample, of map[string]string) *line {
	b := labels.NewBuilder(labels.EmptyLabels())
	for name, value := range sample.Metric {
		b.Set(string(name), string(value))
	}
	for name, value := range of {
		if mine := b.Get(name); mine != "" { // as Prometheus does without honor_labels
			b.Set("exported_"+name, mine)
		}
		b.Set(name, value)
	}
	l := b.Labels()
	if s[l.String()] == nil {
		s[l.String()] = &line{labels: l}
	}
	found := s[l.String()]
	found.samples = append(found.samples, point{int64(sample.Timestamp), float64(sample.Value)})
	return found
}

// pace returns by how much l changes in each further step. A counter grows as it did
// before the last scrape. A clock continues in its last direction. All
// else stays.
func (l *line) pace(kind dto.MetricType, clocks []string) float64 {
	n := len(l.samples)
	if n < 2 {
		return 0
	}
	grown := l.samples[n-1].F() - l.samples[n-2].F()
	switch {
	case kind == dto.MetricType_COUNTER, kind == dto.MetricType_HISTOGRAM:
		return grown
	case slices.Contains(clocks, l.labels.Get(model.MetricNameLabel)) && grown != 0:
		return math.Copysign(step.Seconds(), grown)
	}
	return 0
}

// goOn adds the samples of n scrapes more.
func (l *line) goOn(n int64, pace float64) {
	last := l.samples[len(l.samples)-1]
	for i := int64(1); i <= n; i++ {
		l.samples = append(l.samples, point{last.T() + i*step.Milliseconds(), last.F() + pace*float64(i)})
	}
}

// Querier is that of a [storage.Queryable].
func (s series) Querier(_, _ int64) (storage.Querier, error) { return querier{s}, nil }

type querier struct{ series }

// Select hands out all samples: the engine takes those of its time.
func (q querier) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	set := &seriesSet{}
	for _, l := range q.series {
		if !slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(l.labels.Get(m.Name)) }) {
			set.all = append(set.all, storage.NewListSeries(l.labels, l.samples))
		}
	}
	slices.SortFunc(set.all, func(a, b storage.Series) int { return labels.Compare(a.Labels(), b.Labels()) })
	return set
}

// LabelValues is not asked for by queries.
func (querier) LabelValues(context.Context, string, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

// LabelNames is not asked for by queries.
func (querier) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (querier) Close() error { return nil }

type seriesSet struct {
	all  []storage.Series
	next int
}

func (s *seriesSet) Next() bool                      { s.next++; return s.next <= len(s.all) }
func (s *seriesSet) At() storage.Series              { return s.all[s.next-1] }
func (*seriesSet) Err() error                        { return nil }
func (*seriesSet) Warnings() annotations.Annotations { return nil }

// point is a sample of a number.
type point struct {
	at    int64
	value float64
}

func (p point) T() int64                    { return p.at }
func (point) ST() int64                     { return 0 }
func (p point) F() float64                  { return p.value }
func (point) H() *histogram.Histogram       { return nil }
func (point) FH() *histogram.FloatHistogram { return nil }
func (point) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (p point) Copy() chunks.Sample         { return p }
