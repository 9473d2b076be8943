// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// object is a pointer to an object of the API.
type object interface {
	metav1.Object
	comparable
}

// reads holds, by replica and name, the objects that the replicas have read live, or the later version that a watch had shown
// them when the response arrived. Nil: the object did not exist.
type reads[T object] struct{ live, watched map[*replica]map[string]T }

func newReads[T object]() reads[T] {
	return reads[T]{map[*replica]map[string]T{}, map[*replica]map[string]T{}}
}

func set[T any](m map[*replica]map[string]T, of *replica, name string, obj T) {
	if m[of] == nil {
		m[of] = map[string]T{}
	}
	m[of][name] = obj
}

// received records the response to a live read.
func (r reads[T]) received(by *replica, name string, obj T) {
	var none T
	if watched := r.watched[by][name]; obj != none && watched != none && version(watched) > version(obj) {
		obj = watched
	}
	set(r.live, by, name, obj)
}

// used ends what the last live read permits: the next call needs another one.
func (r reads[T]) used(by *replica, name string) { delete(r.live[by], name) }

// shown records the event of a watch.
func (r reads[T]) shown(to *replica, obj T) {
	set(r.watched, to, obj.GetName(), obj)
}
