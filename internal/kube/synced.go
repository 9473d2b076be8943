// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// notSynced names the resources whose first list is missing.
type notSynced struct {
	resources []string // with the last error
	refused   bool     // the API server refuses a list; else it may be unreachable
}

func (e notSynced) Error() string {
	return "waiting for the first list of " + strings.Join(e.resources, ", ")
}

// IsListRefused reports whether an error of [Informers.Synced] is one because the API server forbids a list, or does not serve the
// resource.
func IsListRefused(err error) bool {
	var e notSynced
	return errors.As(err, &e) && e.refused
}

// Synced returns an error that names the resources of users whose initial list is not complete. Without users, it
// considers all resources. It ignores optional resources that are [Informers.Forbidden].
func (i *Informers) Synced(users ...string) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	var missing notSynced
	for _, resource := range slices.Sorted(maps.Keys(i.informers)) {
		if !i.used(resource, users) || i.informers[resource].HasSynced() || i.forbidden(resource, users...) {
			continue
		}
		err := i.watchErrors[resource]
		if err != nil {
			resource += fmt.Sprintf(" (%v)", err)
		}
		missing.resources = append(missing.resources, resource)
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsNotFound(err) {
			missing.refused = true
		}
	}
	if missing.resources == nil {
		return nil
	}
	return missing
}
