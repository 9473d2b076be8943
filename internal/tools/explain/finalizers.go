// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import "github.com/storage-controller/storage-controller/internal/finalizers"

// finalizersOf returns who removes each finalizer of an object, and when. drivers are those that the
// object may belong to.
func finalizersOf(kind string, names []string, drivers ...string) []Finalizer {
	all := []Finalizer{}
	for _, name := range names {
		r := finalizers.RemovalOf(kind, name, drivers...)
		all = append(all, Finalizer{Name: name, By: r.By, When: r.When})
	}
	return all
}
