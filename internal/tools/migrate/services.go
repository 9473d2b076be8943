// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// portReference is a field of an object that names a port of a pod, by number or name.
type portReference struct{ object, field, port string }

// portFields are the fields of lists that name ports of pods, by kind: the path of the list, and the fields of an item.
var portFields = map[string][]struct {
	list, selector []string
	fields         []string
}{
	"Service":        {{[]string{"spec", "ports"}, []string{"spec", "selector"}, []string{"targetPort", "port"}}},
	"ServiceMonitor": {{[]string{"spec", "endpoints"}, nil, []string{"targetPort"}}},
	"PodMonitor": {{[]string{"spec", "podMetricsEndpoints"}, []string{"spec", "selector", "matchLabels"},
		[]string{"port", "portNumber", "targetPort"}}},
	"NetworkPolicy": {{[]string{"spec", "ingress"}, []string{"spec", "podSelector", "matchLabels"}, nil}},
}

// references returns the fields of objects, and the annotations of w, that name one of ports of the pods of w.
func references(objects map[string][]*yaml.Node, w workload, ports []string) []portReference {
	var refs []portReference
	for _, kind := range []string{"Service", "ServiceMonitor", "PodMonitor", "NetworkPolicy"} {
		for _, object := range objects[kind] {
			for _, f := range portFields[kind] {
				if f.selector != nil && !selects(get(object, f.selector...), w) || !sameNamespace(object, w.node) {
					continue
				}
				for _, item := range items(get(object, f.list...)) {
					name := kind + " " + text(get(object, "metadata", "name"))
					refs = append(refs, portsOf(item, name, f.fields, ports)...)
				}
			}
		}
	}
	annotations := get(w.node, "spec", "template", "metadata", "annotations")
	for i := 0; annotations != nil && i+1 < len(annotations.Content); i += 2 {
		key, value := annotations.Content[i].Value, annotations.Content[i+1].Value
		if strings.HasSuffix(key, "/port") && slices.Contains(ports, value) {
			refs = append(refs, portReference{w.name, "the annotation " + key, value})
		}
	}
	return refs
}

// portsOf returns the references of an item. Without fields, item is a rule of a NetworkPolicy.
func portsOf(item *yaml.Node, object string, fields, ports []string) []portReference {
	if fields == nil {
		var refs []portReference
		for _, p := range items(get(item, "ports")) {
			refs = append(refs, portsOf(p, object, []string{"port"}, ports)...)
		}
		return refs
	}
	for _, field := range fields {
		if v := text(get(item, field)); v != "" {
			if slices.Contains(ports, v) {
				return []portReference{{object, field, v}}
			}
			return nil // the first field that is set counts
		}
	}
	return nil
}

// selects reports whether labels select the pods of w.
func selects(labels *yaml.Node, w workload) bool {
	have := get(w.node, "spec", "template", "metadata", "labels")
	for i := 0; labels != nil && i+1 < len(labels.Content); i += 2 {
		if text(get(have, labels.Content[i].Value)) != labels.Content[i+1].Value {
			return false
		}
	}
	return labels != nil
}

// sameNamespace reports whether two objects may be in the same namespace.
func sameNamespace(a, b *yaml.Node) bool {
	x, y := text(get(a, "metadata", "namespace")), text(get(b, "metadata", "namespace"))
	return x == y || x == "" || y == ""
}
