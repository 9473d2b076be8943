// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
)

// CustomResource is a custom resource whose objects belong to one node each, and are deleted with it.
type CustomResource struct {
	Resource schema.GroupVersionResource
	// NodeField is the path of the field with the name of the node, such as spec, nodeName.
	NodeField []string
	// HandleField is the path of the field with the handle of the volume. An object is kept while its volume is.
	HandleField []string
	// Finalizer is removed before the deletion, unless it is empty.
	Finalizer string
	// MarkKey and MarkValue are an annotation that is set when Finalizer is removed, so that the
	// driver does not add the finalizer again. MarkKey may be empty.
	MarkKey, MarkValue string
	When               ResourceWhen
}

// ResourceWhen selects when the custom resources of a node are deleted.
type ResourceWhen string

// When the custom resources of a node are deleted.
const (
	// WhenNodeTerminating deletes them with the claims, while the Node waits for our finalizer.
	WhenNodeTerminating ResourceWhen = "node-terminating"
	// WhenNodeGone deletes them after the Node, so that a running driver can delete them first.
	WhenNodeGone ResourceWhen = "node-gone"
)

// ParseResource parses a value of --node-cleanup-resource: key=value items, separated by commas.
// The keys resource, node-field and handle-field are required; finalizer, mark and when are optional.
func ParseResource(text string) (CustomResource, error) {
	r := CustomResource{When: WhenNodeGone}
	var errs []error
	seen := map[string]bool{}
	for item := range strings.SplitSeq(text, ",") {
		switch key, value, _ := strings.Cut(strings.TrimSpace(item), "="); {
		case value == "":
			errs = append(errs, fmt.Errorf("item %q: must be key=value", item))
		case seen[key]:
			errs = append(errs, fmt.Errorf("%s: must not be repeated", key))
		default:
			seen[key] = true
			errs = append(errs, r.set(key, value))
		}
	}
	if !seen["resource"] {
		errs = append(errs, errors.New("resource: is missing"))
	}
	if !seen["node-field"] {
		errs = append(errs, errors.New("node-field: is missing"))
	}
	if !seen["handle-field"] {
		errs = append(errs, errors.New("handle-field: is missing"))
	}
	if seen["mark"] && !seen["finalizer"] {
		errs = append(errs, errors.New("mark: is set only when a finalizer is removed, and finalizer is missing"))
	}
	return r, errors.Join(errs...)
}

// set parses one item.
func (r *CustomResource) set(key, value string) error {
	switch key {
	case "resource":
		gvr, _ := schema.ParseResourceArg(value)
		// The groups of custom resources contain a dot. Those of Kubernetes itself are refused.
		if gvr == nil || !strings.Contains(gvr.Group, ".") || len(validation.IsDNS1123Subdomain(gvr.Group)) > 0 ||
			len(validation.IsDNS1035Label(gvr.Version)) > 0 || len(validation.IsDNS1035Label(gvr.Resource)) > 0 {
			return fmt.Errorf("resource: must be plural.version.group of a custom resource, such as "+
				"logicalvolumes.v1.topolvm.io, got %q", value)
		}
		r.Resource = *gvr
	case "node-field", "handle-field":
		path := strings.Split(value, ".")
		if slices.Contains(path, "") {
			return fmt.Errorf("%s: must be names separated by dots, such as spec.nodeName, got %q", key, value)
		}
		if key == "node-field" {
			r.NodeField = path
		} else {
			r.HandleField = path
		}
	case "finalizer":
		r.Finalizer = value
		return qualified("finalizer", value)
	case "mark":
		k, v, ok := strings.Cut(value, "=")
		r.MarkKey, r.MarkValue = k, v
		if !ok {
			return fmt.Errorf("mark: must be annotation=value, got %q", value)
		}
		return qualified("mark", k)
	case "when":
		r.When = ResourceWhen(value)
		if r.When != WhenNodeTerminating && r.When != WhenNodeGone {
			return fmt.Errorf("when: must be %s or %s, got %q", WhenNodeTerminating, WhenNodeGone, value)
		}
	default:
		return fmt.Errorf("%s: unknown key; the keys are resource, node-field, handle-field, finalizer, mark and when", key)
	}
	return nil
}

// qualified returns an error unless name has a prefix and is valid.
func qualified(what, name string) error {
	if !strings.Contains(name, "/") {
		return fmt.Errorf("%s: must have a prefix that ends with a slash, got %q", what, name)
	}
	if problems := validation.IsQualifiedName(name); len(problems) > 0 {
		return fmt.Errorf("%s: %q is invalid: %s", what, name, strings.Join(problems, "; "))
	}
	return nil
}
