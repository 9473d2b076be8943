// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// object is a pointer to an object of the API.
type object interface {
	metav1.Object
	comparable
}

// reads holds, by replica and name, the objects that the replicas have read live, or the later version that a watch had shown
// them when the response arrived. Nil: the object did not exist.
type reads[T object] struct {
	live, watched map[*replica]map[string]T
	at            map[*replica]map[string]time.Time // when the last live read was executed
}

func newReads[T object]() reads[T] {
	return reads[T]{map[*replica]map[string]T{}, map[*replica]map[string]T{}, map[*replica]map[string]time.Time{}}
}

func set[T any](m map[*replica]map[string]T, of *replica, name string, obj T) {
	if m[of] == nil {
		m[of] = map[string]T{}
	}
	m[of][name] = obj
}

// received records the response to a live read that was executed at that time.
func (r reads[T]) received(by *replica, name string, obj T, at time.Time) {
	set(r.at, by, name, at)
	var none T
	if watched := r.watched[by][name]; obj != none && watched != none && version(watched) > version(obj) {
		obj = watched
	}
	set(r.live, by, name, obj)
}

// maxReadAge is the age of a live read after which nothing may be deleted.
const maxReadAge = 5 * time.Second

// use ends what the last live read permits: the next call needs another one. It returns an error if the read is too old.
func (r reads[T]) use(by *replica, name string) error {
	delete(r.live[by], name)
	if age := time.Since(r.at[by][name]); age > maxReadAge {
		return fmt.Errorf("it has read %s %v ago", name, age)
	}
	return nil
}

// shown records the event of a watch.
func (r reads[T]) shown(to *replica, obj T) {
	set(r.watched, to, obj.GetName(), obj)
}
