package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

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

// question is what evaluate reads: what was scraped, and what is asked of it.
type question struct {
	Scrapes     []scrape
	Expressions []string
}

// scrape is the text of /metrics at a time, in seconds, with the labels that Prometheus
// gives to what it reads from there.
type scrape struct {
	At     int64
	Labels map[string]string
	Text   string
}

// evaluate asks the engine of Prometheus at the time of the last scrape. It writes a list for
// each expression: the series of the result as text, without values.
func evaluate(in io.Reader, out io.Writer) error {
	var q question
	if err := json.NewDecoder(in).Decode(&q); err != nil {
		return fmt.Errorf("reading what to evaluate: %w", err)
	}
	data, last, err := gathered(q.Scrapes)
	if err != nil {
		return err
	}
	engine := promql.NewEngine(promql.EngineOpts{
		MaxSamples: 1 << 20, Timeout: time.Minute, LookbackDelta: 5 * time.Minute, Parser: parser.NewParser(parser.Options{}),
	})
	results := [][]string{}
	for _, expression := range q.Expressions {
		series, err := data.ask(engine, expression, last)
		if err != nil {
			return fmt.Errorf("expression %q: %w", expression, err)
		}
		results = append(results, series)
	}
	return json.NewEncoder(out).Encode(results)
}

func (s series) ask(engine *promql.Engine, expression string, at time.Time) ([]string, error) {
	ctx := context.Background()
	query, err := engine.NewInstantQuery(ctx, s, nil, expression, at)
	if err != nil {
		return nil, err
	}
	defer query.Close()
	result := query.Exec(ctx)
	if result.Err != nil {
		return nil, result.Err
	}
	if w := result.Warnings.AsErrors(); len(w) > 0 { // such as a rate of what is no counter
		return nil, fmt.Errorf("warnings: %v", w)
	}
	vector, err := result.Vector()
	if err != nil {
		return nil, err
	}
	found := []string{}
	for _, sample := range vector {
		found = append(found, sample.Metric.String())
	}
	slices.Sort(found)
	return found, nil
}

// series is what was scraped: a storage that is small enough to be searched from end to end.
type series map[string]*line

type line struct {
	labels  labels.Labels
	samples []chunks.Sample
}

// gathered sorts scrapes by series, and tells when the last of them was.
func gathered(scrapes []scrape) (series, time.Time, error) {
	all, last := series{}, time.Time{}
	for _, s := range scrapes {
		at := time.Unix(s.At, 0)
		if at.After(last) {
			last = at
		}
		text := expfmt.NewTextParser(model.UTF8Validation)
		families, err := text.TextToMetricFamilies(strings.NewReader(s.Text))
		if err != nil {
			return nil, last, fmt.Errorf("the scrape at %d: %w", s.At, err)
		}
		for _, family := range families {
			vector, err := expfmt.ExtractSamples(&expfmt.DecodeOptions{Timestamp: model.TimeFromUnix(s.At)}, family)
			if err != nil {
				return nil, last, fmt.Errorf("the metric %s at %d: %w", family.GetName(), s.At, err)
			}
			for _, sample := range vector {
				all.add(sample, s.Labels)
			}
		}
	}
	return all, last, nil
}

func (s series) add(sample *model.Sample, of map[string]string) {
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
