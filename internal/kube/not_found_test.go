// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestIsUnstorable(t *testing.T) {
	failedTest := &apierrors.StatusError{ErrStatus: metav1.Status{Reason: metav1.StatusReasonInvalid, Code: 422}}
	for name, test := range map[string]struct {
		err  error
		want bool
	}{
		"etcd":             {apierrors.NewInternalError(errors.New("etcdserver: request is too large")), true},
		"client of etcd":   {apierrors.NewInternalError(errors.New("trying to send message larger than max (2 vs. 1)")), true},
		"request":          {apierrors.NewRequestEntityTooLargeError("limit is 3145728"), true},
		"invalid":          {apierrors.NewInvalid(schema.GroupKind{Kind: "K"}, "name", nil), true},
		"test of a patch":  {failedTest, false},
		"other error":      {apierrors.NewInternalError(errors.New("etcdserver: request timed out")), false},
		"without a status": {errors.New("request is too large"), false},
	} {
		if got := IsUnstorable(test.err); got != test.want {
			t.Errorf("%s: %t, want %t", name, got, test.want)
		}
	}
}
