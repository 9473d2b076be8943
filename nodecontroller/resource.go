package nodecontroller

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Resource is a kind of custom resources of which each belongs to a node, and which
// are cleaned up with it.
type Resource struct {
	Resource schema.GroupVersionResource
	// NodeField is where the name of the node is, such as spec, nodeName.
	NodeField []string
	// Finalizer is removed before the deletion; empty means that none is.
	Finalizer string
	// MarkKey and MarkValue are an annotation that is set with the removal of the
	// finalizer, so that the driver does not add that again; MarkKey is empty for none.
	MarkKey, MarkValue string
	When               ResourceWhen
}

// ResourceWhen says from when on the custom resources of a node are cleaned up.
type ResourceWhen string

// When the custom resources of a node are cleaned up.
const (
	// WhenNodeTerminating is with the claims, while the node still waits for its finalizer.
	WhenNodeTerminating ResourceWhen = "node-terminating"
	// WhenNodeGone is after the node: a driver that is alive could clean up itself before.
	WhenNodeGone ResourceWhen = "node-gone"
)

// ParseResource reads a value of --node-cleanup-resource: items key=value, separated by
// commas. Of the keys resource, node-field, finalizer, mark and when the first two are
// required; when is node-gone where it is left out. All problems are reported.
func ParseResource(text string) (Resource, error) {
	r := Resource{When: WhenNodeGone}
	var errs []error
	seen := map[string]bool{}
	for item := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(item), "=")
		switch {
		case !ok || value == "":
			errs = append(errs, fmt.Errorf("item %q: must be key=value", item))
			continue
		case seen[key]:
			errs = append(errs, fmt.Errorf("%s: is there twice", key))
			continue
		}
		seen[key] = true
		if err := r.set(key, value); err != nil {
			errs = append(errs, err)
		}
	}
	for _, key := range []string{"resource", "node-field"} {
		if !seen[key] {
			errs = append(errs, fmt.Errorf("%s: is missing", key))
		}
	}
	if seen["mark"] && !seen["finalizer"] {
		errs = append(errs, errors.New("mark: is only set with the removal of a finalizer, and finalizer is missing"))
	}
	if err := errors.Join(errs...); err != nil {
		return Resource{}, err
	}
	return r, nil
}

// set sets what one item of the text says.
func (r *Resource) set(key, value string) error {
	switch key {
	case "resource":
		gvr, _ := schema.ParseResourceArg(value)
		// The group of a custom resource has a dot; those without one are of Kubernetes
		// itself, whose objects are nobody's to clean up here.
		if gvr == nil || !strings.Contains(gvr.Group, ".") || len(validation.IsDNS1123Subdomain(gvr.Group)) > 0 ||
			len(validation.IsDNS1035Label(gvr.Version)) > 0 || len(validation.IsDNS1035Label(gvr.Resource)) > 0 {
			return fmt.Errorf("resource: must be plural.version.group of a custom resource, such as logicalvolumes.v1.topolvm.io, got %q", value)
		}
		r.Resource = *gvr
	case "node-field":
		r.NodeField = strings.Split(value, ".")
		if slices.Contains(r.NodeField, "") {
			return fmt.Errorf("node-field: must be names separated by dots, such as spec.nodeName, got %q", value)
		}
	case "finalizer":
		r.Finalizer = value
		return prefixed("finalizer", value)
	case "mark":
		k, v, ok := strings.Cut(value, "=")
		if r.MarkKey, r.MarkValue = k, v; !ok {
			return fmt.Errorf("mark: must be annotation=value, got %q", value)
		}
		return prefixed("mark", k)
	case "when":
		r.When = ResourceWhen(value)
		return oneOf("when", r.When, WhenNodeTerminating, WhenNodeGone)
	default:
		return fmt.Errorf("%s: unknown key; the keys are resource, node-field, finalizer, mark and when", key)
	}
	return nil
}
