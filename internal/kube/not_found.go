// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// IsNotFound reports whether err means that an object does not exist. The NotFound of a proxy that
// does not serve the path says nothing about the object.
//
// A write that removes a finalizer is done if it returns NotFound: without the object, there is no
// finalizer to remove. [MutationCache.RecordWrite] implements this rule for all objects in a cache.
func IsNotFound(err error) bool {
	return apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

// IsUnstorable reports whether the API server can never store what a write contains: it is invalid or too large. The errors of etcd
// and of its client have no reason of their own.
func IsUnstorable(err error) bool {
	if apierrors.IsInvalid(err) {
		return !IsPatchTestFailed(err)
	}
	return apierrors.IsRequestEntityTooLargeError(err) || apierrors.IsInternalError(err) &&
		(strings.Contains(err.Error(), "request is too large") || strings.Contains(err.Error(), "trying to send message larger than max"))
}

// ErrNotStored says that a write succeeded, but that the object does not have the change.
var ErrNotStored = errors.New("the API server has not stored it. Check the admission policies and webhooks for this resource")

// IsRefused reports whether the API server has definitely not executed a write because of a permission, a policy, a webhook or an
// invalid object, or without the change: a retry alone does not help.
func IsRefused(err error) bool {
	refused := errors.Is(err, ErrNotStored) ||
		apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) // the default of webhooks
	return refused && !IsPatchTestFailed(err)
}

// RecordRefused reports whether the record of a call is definitely not written: besides [IsRefused], if the patch does not apply although
// [MutationCache.Outdated] knows no newer state.
func RecordRefused(err error) bool { return IsRefused(err) || apierrors.IsInvalid(err) }
