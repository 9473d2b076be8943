// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Names is a flag of the form NAME,NAME. The last one of repeated flags counts.
type Names []string

func (n *Names) Type() string { return "string" }

func (n *Names) String() string { return strings.Join(*n, ",") }

func (n *Names) Set(value string) error {
	*n = Names{}
	if value != "" {
		*n = strings.Split(value, ",")
	}
	return nil
}

// Pairs is a flag of the form k:v,k:v. Repeated flags are merged.
type Pairs map[string]string

func (p *Pairs) Type() string { return "key:value,..." }

func (p *Pairs) String() string {
	if p == nil {
		return ""
	}
	return joinMap(*p, func(k, v string) string { return k + ":" + v })
}

func (p *Pairs) Set(value string) error {
	merged := Pairs{}
	maps.Copy(merged, *p)
	for item := range strings.SplitSeq(value, ",") {
		k, v, ok := strings.Cut(item, ":")
		if !ok || strings.Contains(v, ":") || strings.TrimSpace(k) == "" {
			return fmt.Errorf("malformed item %q: must be key:value", item)
		}
		merged[strings.TrimSpace(k)] = strings.TrimSpace(v)
	}
	*p = merged
	return nil
}

// Gates is a flag of the form Name=bool,Name=bool. Repeated flags are merged.
type Gates map[string]bool

func (g *Gates) Type() string { return "Name=bool,..." }

func (g *Gates) String() string {
	if g == nil {
		return ""
	}
	return joinMap(*g, func(k string, v bool) string { return fmt.Sprintf("%s=%t", k, v) })
}

func (g *Gates) Set(value string) error {
	merged := Gates{}
	maps.Copy(merged, *g)
	for item := range strings.SplitSeq(value, ",") {
		if strings.TrimSpace(item) == "" {
			continue
		}
		k, v, ok := strings.Cut(item, "=")
		on, err := strconv.ParseBool(strings.TrimSpace(v))
		if !ok || err != nil {
			return fmt.Errorf("malformed item %q: must be Name=true or Name=false", item)
		}
		merged[strings.TrimSpace(k)] = on
	}
	*g = merged
	return nil
}

// joinMap writes the items of m in the order of their keys, separated by commas.
func joinMap[V any](m map[string]V, item func(string, V) string) string {
	var items []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		items = append(items, item(k, m[k]))
	}
	return strings.Join(items, ",")
}
