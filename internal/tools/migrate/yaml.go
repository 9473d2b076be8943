// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// get returns the value at a path of keys, nil if there is none.
func get(n *yaml.Node, path ...string) *yaml.Node {
	for _, key := range path {
		n = child(n, key)
	}
	return n
}

func child(n *yaml.Node, key string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key && n.Content[i+1].Tag != "!!null" {
			return n.Content[i+1]
		}
	}
	return nil
}

// text returns the value of a scalar, "" for any other node.
func text(n *yaml.Node) string {
	if n == nil || n.Kind != yaml.ScalarNode {
		return ""
	}
	return n.Value
}

// items returns the items of a sequence.
func items(n *yaml.Node) []*yaml.Node {
	if n == nil || n.Kind != yaml.SequenceNode {
		return nil
	}
	return n.Content
}

func scalar(value string) *yaml.Node {
	n := &yaml.Node{}
	n.SetString(value)
	return n
}

// number returns a scalar that is not quoted.
func number(value string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: value}
}

func mapping(pairs ...*yaml.Node) *yaml.Node {
	return &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Content: pairs}
}

func sequence(items ...*yaml.Node) *yaml.Node {
	return &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Content: items}
}

// set sets the value of a key in a mapping.
func set(n *yaml.Node, key string, value *yaml.Node) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			n.Content[i+1] = value
			return
		}
	}
	n.Content = append(n.Content, scalar(key), value)
}

// without returns a copy of a mapping without key.
func without(n *yaml.Node, key string) *yaml.Node {
	c := resolved(n)
	for i := 0; i+1 < len(c.Content); i += 2 {
		if c.Content[i].Value == key {
			c.Content = slices.Delete(c.Content, i, i+2)
			break
		}
	}
	return c
}

// resolved returns a copy of n in which aliases and merge keys are replaced by their values.
func resolved(n *yaml.Node) *yaml.Node {
	if n == nil {
		return nil
	}
	if n.Kind == yaml.AliasNode {
		return resolved(n.Alias)
	}
	c := *n
	c.Anchor, c.Content = "", nil
	if n.Kind != yaml.MappingNode {
		for _, item := range n.Content {
			c.Content = append(c.Content, resolved(item))
		}
		return &c
	}
	var merged []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], resolved(n.Content[i+1])
		switch {
		case key.Tag != "!!merge":
			c.Content = append(c.Content, resolved(key), value)
		case value.Kind == yaml.SequenceNode:
			merged = append(merged, value.Content...)
		default:
			merged = append(merged, value)
		}
	}
	for _, from := range merged {
		for i := 0; i+1 < len(from.Content); i += 2 {
			if child(&c, from.Content[i].Value) == nil {
				c.Content = append(c.Content, from.Content[i], from.Content[i+1])
			}
		}
	}
	return &c
}

// equal reports whether two trees have the same content and anchors. It ignores styles and comments.
func equal(a, b *yaml.Node) bool {
	if a == nil || b == nil {
		return a == b
	}
	if a.Kind != b.Kind || a.Anchor != b.Anchor || len(a.Content) != len(b.Content) {
		return false
	}
	if a.Kind != yaml.MappingNode && a.Kind != yaml.SequenceNode && (a.Value != b.Value || a.ShortTag() != b.ShortTag()) {
		return false
	}
	for i := range a.Content {
		if !equal(a.Content[i], b.Content[i]) {
			return false
		}
	}
	return true
}

// sameValue reports whether two nodes have the same value, in any order of keys.
func sameValue(a, b *yaml.Node) bool {
	var x, y any
	if a == nil || b == nil {
		return a == b
	}
	return a.Decode(&x) == nil && b.Decode(&y) == nil && fmt.Sprint(x) == fmt.Sprint(y)
}

// maxNodes bounds the size of a document with its aliases replaced.
const maxNodes = 1_000_000

// checkAliases returns an error if the aliases of a document cannot be replaced.
func checkAliases(root *yaml.Node) error {
	const open = -1
	sizes := map[*yaml.Node]int{}
	var size func(*yaml.Node) (int, error)
	size = func(n *yaml.Node) (int, error) {
		switch known := sizes[n]; {
		case known == open:
			return 0, fmt.Errorf("line %d: the anchor &%s contains itself", n.Line, n.Anchor)
		case known > 0:
			return known, nil
		}
		sizes[n] = open
		sum, inside := 1, n.Content
		if n.Kind == yaml.AliasNode {
			inside = []*yaml.Node{n.Alias}
		}
		for _, c := range inside {
			more, err := size(c)
			if err != nil {
				return 0, err
			}
			sum += more
			if sum > maxNodes {
				return 0, fmt.Errorf("line %d: aliases make the document larger than %d values", n.Line, maxNodes)
			}
		}
		sizes[n] = sum
		return sum, nil
	}
	_, err := size(root)
	return err
}

// checkKeys returns an error if a mapping has a key twice.
func checkKeys(n *yaml.Node) error {
	seen := map[string]bool{}
	for i, c := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 0 && c.Kind == yaml.ScalarNode {
			if seen[c.Value] {
				return fmt.Errorf("line %d: the key %s is there twice", c.Line, c.Value)
			}
			seen[c.Value] = true
		}
		if err := checkKeys(c); err != nil {
			return err
		}
	}
	return nil
}

// danglingAlias returns the name of an anchor that an alias in n refers to and n does not have.
func danglingAlias(n *yaml.Node) string {
	anchors, used := map[string]bool{}, []string{}
	var walk func(*yaml.Node)
	walk = func(n *yaml.Node) {
		if n.Anchor != "" {
			anchors[n.Anchor] = true
		}
		if n.Kind == yaml.AliasNode {
			used = append(used, n.Value)
		}
		for _, c := range n.Content {
			walk(c)
		}
	}
	walk(n)
	for _, name := range used {
		if !anchors[name] {
			return name
		}
	}
	return ""
}

// oldBoolean matches strings that are booleans in YAML 1.1, as kubectl reads it. The encoder writes YAML 1.2, which has them without
// quotes.
var oldBoolean = regexp.MustCompile(`^(?i:y|yes|n|no|on|off)$`)

// toBlock replaces the flow style and the quotes of JSON by block style, in n and below.
func toBlock(n *yaml.Node) {
	n.Style &^= yaml.FlowStyle
	if n.Kind == yaml.ScalarNode && n.Style == yaml.DoubleQuotedStyle && !oldBoolean.MatchString(n.Value) {
		n.Style = 0
		if n.ShortTag() == "!!str" {
			n.Tag = "!!str" // the encoder quotes it if necessary
		}
	}
	for _, c := range n.Content {
		toBlock(c)
	}
}

// encode encodes a tree. compact puts the dashes of a sequence in the column of its key.
func encode(n *yaml.Node, compact bool) (string, error) {
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if compact {
		e.CompactSeqIndent()
	}
	if err := e.Encode(n); err != nil {
		return "", err
	}
	if err := e.Close(); err != nil {
		return "", err
	}
	return b.String(), nil
}

// commented returns text as a wrapped comment. Continued lines are indented.
func commented(text string) string {
	const width = 96
	var lines []string
	line := "#"
	for word := range strings.FieldsSeq(text) {
		if len(line)+1+len(word) > width && line != "#" && line != "#  " {
			lines = append(lines, line)
			line = "#  "
		}
		line += " " + word
	}
	return strings.Join(append(lines, line), "\n")
}
