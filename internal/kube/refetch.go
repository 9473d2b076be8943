// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import "context"

// Refetch reads obj from the API server, for decisions that a stale cache must not make. It observes
// the response. It returns false and marks obj as deleted if the object does not exist, or if its
// name belongs to an object with another UID.
func (o *MutationCache[T]) Refetch(ctx context.Context, w Writer[T], obj T) (live T, exists bool, err error) {
	live, err = refetch(ctx, w, obj)
	switch {
	case IsNotFound(err):
		o.MarkDeleted(obj)
		return obj, false, nil
	case err != nil:
		return obj, false, err
	}
	o.Observe(live)
	return live, true, nil
}
