// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// documents rewrites each document of a stream separately, so that a change of one does not
// touch the text of the others.
func (m *migration) documents(stream string) (string, error) {
	var out strings.Builder
	for i, doc := range split(stream) {
		changed, err := m.document(doc)
		if err != nil {
			return "", fmt.Errorf("document %d: %w", i+1, err)
		}
		out.WriteString(changed)
	}
	return out.String(), nil
}

// split splits a stream before each line that begins a document.
func split(stream string) []string {
	var docs []string
	begin := 0
	for at := 0; at < len(stream); {
		end := len(stream)
		if i := strings.IndexByte(stream[at:], '\n'); i >= 0 {
			end = at + i + 1
		}
		line := strings.TrimRight(stream[at:end], "\r\n")
		if at > begin && (line == "---" || strings.HasPrefix(line, "--- ")) {
			docs = append(docs, stream[begin:at])
			begin = at
		}
		at = end
	}
	return append(docs, stream[begin:])
}

// parse parses a single document. It returns nil for an empty one.
func parse(doc string) (*yaml.Node, error) {
	decoder := yaml.NewDecoder(strings.NewReader(doc))
	var root yaml.Node
	if err := decoder.Decode(&root); errors.Is(err, io.EOF) {
		return nil, nil
	} else if err != nil {
		if strings.Contains(doc, "{{") {
			return nil, fmt.Errorf("%w. This looks like a template: render it, for example with helm template, and migrate the output", err)
		}
		return nil, err
	}
	if err := checkAliases(&root); err != nil {
		return nil, err
	}
	return &root, checkKeys(&root)
}

// readObjects sets m.objects.
func (m *migration) readObjects(stream string) error {
	m.objects = map[string][]*yaml.Node{}
	var add func(n *yaml.Node)
	add = func(n *yaml.Node) {
		kind := text(get(n, "kind"))
		m.objects[kind] = append(m.objects[kind], n)
		for _, item := range items(get(n, "items")) {
			add(item)
		}
	}
	for i, doc := range split(stream) {
		root, err := parse(doc)
		if err != nil {
			return fmt.Errorf("document %d: %w", i+1, err)
		}
		if root != nil && len(root.Content) > 0 {
			add(resolved(root.Content[0]))
		}
	}
	return nil
}

// edit replaces containers of one list.
type edit struct {
	list   *yaml.Node
	spans  []span // of its items; nil if items share lines
	remove map[int]bool
	insert map[int][]*yaml.Node // by the index of the next item
}

func (m *migration) document(doc string) (string, error) {
	root, err := parse(doc)
	if err != nil || root == nil || len(root.Content) == 0 {
		return doc, err
	}
	lines := strings.SplitAfter(doc, "\n")
	if last := len(lines) - 1; lines[last] != "" {
		lines[last] += "\n"
	}
	var edits []*edit
	for _, w := range workloads(root.Content[0]) {
		var groups []*group
		for _, key := range []string{"initContainers", "containers"} {
			list := get(w.pod, key)
			e := &edit{list: list, remove: map[int]bool{}, insert: map[int][]*yaml.Node{}}
			if list != nil && list.Kind == yaml.SequenceNode {
				e.spans = spansOf(lines, list)
			}
			if added := m.replaceContainers(w, e, lines); len(added) > 0 {
				edits, groups = append(edits, e), append(groups, added...)
			}
		}
		m.finish(w, groups)
	}
	if len(edits) == 0 {
		return doc, nil
	}
	return rewrite(doc, lines, root, edits)
}

// workload is an object that creates pods.
type workload struct {
	name string // kind and name
	node *yaml.Node
	pod  *yaml.Node // the spec of its pods
}

func workloads(n *yaml.Node) []workload {
	switch kind := text(get(n, "kind")); kind {
	case "List":
		var all []workload
		for _, item := range items(get(n, "items")) {
			all = append(all, workloads(item)...)
		}
		return all
	case "Deployment", "StatefulSet", "DaemonSet":
		if pod := get(n, "spec", "template", "spec"); pod != nil {
			return []workload{{name: kind + " " + text(get(n, "metadata", "name")), node: n, pod: pod}}
		}
	}
	return nil
}

// rewrite replaces the lines of containers. If the result differs from the edited tree, it
// encodes the whole document instead.
func rewrite(doc string, lines []string, root *yaml.Node, edits []*edit) (string, error) {
	spliced, bySplice := "", true
	for _, e := range edits {
		bySplice = bySplice && e.spans != nil
	}
	if bySplice {
		var err error
		if spliced, err = splice(lines, edits); err != nil {
			return "", err
		}
	}
	for _, e := range edits {
		e.apply()
	}
	if anchor := danglingAlias(root); anchor != "" {
		return "", fmt.Errorf("the anchor &%s is in a replaced container, and *%s refers to it from outside. "+
			"Replace the alias with its value", anchor, anchor)
	}
	if bySplice {
		if again, err := parse(spliced); err == nil && again != nil && equal(root, again) {
			return spliced, nil
		}
	}
	toBlock(root)
	out, err := encode(root, true)
	if strings.HasPrefix(doc, "---") {
		out = "---\n" + out
	}
	return out, err
}

// apply applies e to the tree.
func (e *edit) apply() {
	var kept []*yaml.Node
	for i, item := range e.list.Content {
		kept = append(kept, e.insert[i]...)
		if !e.remove[i] {
			kept = append(kept, item)
		}
	}
	e.list.Content = append(kept, e.insert[len(e.list.Content)]...)
}

// span holds the lines of an item of a list: its comment begins at head, the item at begin, and
// the next line after it is end. Indexes begin at 0.
type span struct{ head, begin, end int }

// spansOf returns the spans of the items of list, or nil if an item shares a line.
func spansOf(lines []string, list *yaml.Node) []span {
	if list.Style&yaml.FlowStyle != 0 || len(list.Content) == 0 {
		return nil
	}
	var spans []span
	indent := list.Column - 1
	for _, item := range list.Content {
		begin := item.Line - 1
		if item.Kind == yaml.AliasNode || item.Style&yaml.FlowStyle != 0 {
			begin = -1
		}
		for begin >= 0 && !isDash(lines[begin], indent) {
			begin--
		}
		if begin < 0 || len(spans) > 0 && begin < spans[len(spans)-1].end {
			return nil
		}
		end := begin + 1
		for i := end; i < len(lines); i++ {
			if blank(lines[i]) {
				continue
			}
			if indentOf(lines[i]) <= indent {
				break
			}
			end = i + 1
		}
		head := begin
		for head > 0 && strings.HasPrefix(strings.TrimSpace(lines[head-1]), "#") && indentOf(lines[head-1]) == indent {
			head--
		}
		spans = append(spans, span{head, begin, end})
	}
	return spans
}

func isDash(line string, indent int) bool {
	return indentOf(line) == indent && strings.HasPrefix(line[indent:], "-")
}

func indentOf(line string) int { return len(line) - len(strings.TrimLeft(line, " ")) }

func blank(line string) bool { return strings.TrimSpace(line) == "" }

// comment returns the comment above item i.
func (e *edit) comment(lines []string, i int) string {
	if e.spans == nil {
		return e.list.Content[i].HeadComment
	}
	var comment []string
	for _, line := range lines[e.spans[i].head:e.spans[i].begin] {
		comment = append(comment, strings.TrimSpace(line))
	}
	return strings.Join(comment, "\n")
}

// lostComments returns the comments inside a container that the new one does not have, with the
// name of the old one.
func (e *edit) lostComments(lines []string, s *source, container *yaml.Node) []string {
	if e.spans == nil {
		return nil
	}
	kept, err := encode(container, true)
	if err != nil {
		return nil // splice returns the error
	}
	var comments []string
	for _, line := range lines[e.spans[s.index].begin:e.spans[s.index].end] {
		comment, found := strings.CutPrefix(strings.TrimSpace(line), "#")
		if found && strings.TrimSpace(comment) != "" && !strings.Contains(kept, strings.TrimSpace(line)) {
			comments = append(comments, "# "+s.name+": "+strings.TrimSpace(comment))
		}
	}
	return comments
}

// splice replaces lines from the last to the first, so that the indexes of the others stay valid.
func splice(lines []string, edits []*edit) (string, error) {
	newline := "\n"
	if len(lines) > 1 && strings.HasSuffix(lines[0], "\r\n") {
		newline = "\r\n"
	}
	slices.SortFunc(edits, func(a, b *edit) int { return b.spans[0].begin - a.spans[0].begin })
	for _, e := range edits {
		for i := len(e.spans); i >= 0; i-- {
			var block []string
			if nodes := e.insert[i]; len(nodes) > 0 {
				var err error
				if block, err = render(nodes, e.list.Column-1, isCompact(lines, e.spans[0].begin), newline); err != nil {
					return "", err
				}
			}
			lines = e.replaceItem(lines, i, block)
		}
	}
	return strings.Join(lines, ""), nil
}

// replaceItem inserts block before item i, and removes the item if e says so.
func (e *edit) replaceItem(lines []string, i int, block []string) []string {
	if i == len(e.spans) {
		return slices.Insert(lines, e.spans[i-1].end, block...)
	}
	s := e.spans[i]
	if len(block) > 0 && i > 0 && !e.remove[i] {
		return slices.Insert(lines, e.spans[i-1].end, block...)
	}
	if !e.remove[i] {
		return slices.Insert(lines, s.begin, block...)
	}
	if len(block) > 0 {
		return slices.Replace(lines, s.begin, s.end, block...)
	}
	end := s.end // with the empty lines below it
	for end < len(lines) && blank(lines[end]) && lines[end] != "" {
		end++
	}
	if i == len(e.spans)-1 {
		end = s.end
	}
	return slices.Delete(lines, s.head, end)
}

// isCompact reports whether the dash of the item at begin is in the column of its key.
func isCompact(lines []string, begin int) bool {
	for i := begin - 1; i >= 0; i-- {
		if !blank(lines[i]) && !strings.HasPrefix(strings.TrimSpace(lines[i]), "#") {
			return indentOf(lines[i]) == indentOf(lines[begin])
		}
	}
	return true
}

// render returns containers as the lines of items whose dash has the given indent.
func render(nodes []*yaml.Node, indent int, compact bool, newline string) ([]string, error) {
	list, err := encode(sequence(nodes...), compact)
	if err != nil {
		return nil, err
	}
	var out []string
	for line := range strings.SplitSeq(strings.TrimRight(list, "\n"), "\n") {
		if line != "" {
			line = strings.Repeat(" ", indent) + line
		}
		out = append(out, line+newline)
	}
	return out, nil
}
