// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"slices"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/api/resource"
)

// counted returns the sources whose resources the new container needs. A health check needs next to none.
func (g *group) counted() []*source {
	return slices.DeleteFunc(slices.Clone(g.sources), func(s *source) bool { return s.kind == livenessprobe })
}

// resources returns the sums of the requests and limits of the sources. A limit that one source
// does not have is dropped.
func (g *group) resources() *yaml.Node {
	replaced := g.counted()
	if len(replaced) < 2 {
		return get(g.sources[0].node, "resources")
	}
	sums := mapping()
	keys := []string{"limits", "requests"}
	if first := get(replaced[0].node, "resources"); first != nil && len(first.Content) > 0 && first.Content[0].Value == "requests" {
		slices.Reverse(keys)
	}
	for _, key := range keys {
		if sum := g.sumAll(key); len(sum.Content) > 0 {
			set(sums, key, sum)
		}
	}
	if claims := g.joined("resources", "claims"); len(claims) > 0 {
		set(sums, "claims", sequence(claims...))
	}
	if len(sums.Content) == 0 {
		sums.Style = yaml.FlowStyle
	}
	return sums
}

// sumAll returns the sums of the limits or the requests, in the order of the first source. Kubernetes takes a limit for a
// request that is not set, also for that of the new container unless its limit is dropped.
func (g *group) sumAll(key string) *yaml.Node {
	out := mapping()
	for _, s := range g.counted() {
		all := quantities(s, key)
		if key == "requests" {
			all = slices.Concat(all, quantities(s, "limits"))
		}
		for _, name := range all {
			lacks := func(key string) func(*source) bool {
				return func(s *source) bool { return get(s.node, "resources", key, name) == nil }
			}
			defaulted := !slices.ContainsFunc(g.counted(), lacks("limits")) && !slices.ContainsFunc(g.counted(), not(lacks("requests")))
			if get(out, name) != nil || key == "requests" && defaulted {
				continue
			}
			if sum := g.sum(key, name); sum != nil {
				set(out, name, sum)
			}
		}
	}
	return out
}

// quantities returns the names of the limits or the requests of s.
func quantities(s *source, key string) (names []string) {
	all := get(s.node, "resources", key)
	for i := 0; all != nil && i+1 < len(all.Content); i += 2 {
		names = append(names, all.Content[i].Value)
	}
	return names
}

func not(f func(*source) bool) func(*source) bool { return func(s *source) bool { return !f(s) } }

func (g *group) sum(key, name string) *yaml.Node {
	var sum resource.Quantity
	for _, s := range g.counted() {
		v := get(s.node, "resources", key, name)
		if v == nil && key == "limits" {
			g.changed("the limit of %s was dropped: %s had none", name, s.name)
			return nil
		}
		if v == nil {
			v = get(s.node, "resources", "limits", name)
		}
		if v == nil {
			continue
		}
		q, err := resource.ParseQuantity(v.Value)
		if err != nil {
			g.must("%s %s in resources.%s of %s was not added: %v", name, v.Value, key, s.name, err)
			continue
		}
		if sum.IsZero() {
			sum = q
		} else {
			sum.Add(q)
		}
	}
	n := scalar(sum.String())
	n.Style = 0 // a number without a unit is not quoted
	return n
}
