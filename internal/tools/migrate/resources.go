package migrate

import (
	"slices"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/api/resource"
)

// resources are the sums of those of the sources. A limit that one of them lacks is
// none for the sum.
func (g *group) resources() *yaml.Node {
	replaced := g.replaced()
	if len(replaced) == 1 {
		return get(replaced[0].node, "resources")
	}
	sums := mapping()
	keys := []string{"limits", "requests"}
	if first := get(replaced[0].node, "resources"); first != nil && len(first.Content) > 0 && first.Content[0].Value == "requests" {
		slices.Reverse(keys)
	}
	for _, key := range keys {
		if sum := g.sum(key); len(sum.Content) > 0 {
			set(sums, key, sum)
		}
	}
	if claims := g.claims(); len(claims) > 0 {
		set(sums, "claims", sequence(claims...))
	}
	if len(sums.Content) == 0 {
		sums.Style = yaml.FlowStyle
	}
	return sums
}

// claims are the ResourceClaims of all sources.
func (g *group) claims() []*yaml.Node {
	var all []*yaml.Node
	for _, s := range g.replaced() {
		all = append(all, items(get(s.node, "resources", "claims"))...)
	}
	return all
}

// sum is that of the limits or the requests, in the order of the first source.
func (g *group) sum(key string) *yaml.Node {
	out := mapping()
	for _, s := range g.replaced() {
		of := get(s.node, "resources", key)
		for i := 0; of != nil && i+1 < len(of.Content); i += 2 {
			name := of.Content[i].Value
			if get(out, name) == nil {
				if q := g.sumOf(key, name); q != nil {
					set(out, name, q)
				}
			}
		}
	}
	return out
}

func (g *group) sumOf(key, name string) *yaml.Node {
	var sum resource.Quantity
	for _, s := range g.replaced() {
		v := get(s.node, "resources", key, name)
		if v == nil && key == "limits" {
			g.note("the limit of %s was dropped: %s had none", name, s.name)
			return nil
		}
		if v == nil {
			continue
		}
		q, err := resource.ParseQuantity(v.Value)
		if err != nil {
			g.note("%s of %s in resources.%s of %s is no quantity (%v): left out of the sum", v.Value, name, key, s.name, err)
			continue
		}
		if sum.IsZero() {
			sum = q
		} else {
			sum.Add(q)
		}
	}
	n := scalar(sum.String())
	n.Style = 0 // a plain number is a quantity too
	return n
}
