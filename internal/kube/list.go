// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/pager"
)

// ListAll returns every object that list returns, in pages of 500. If the continue token of a
// page has expired, all objects are listed in one request. T is a pointer to an API type.
func ListAll[T, L runtime.Object](ctx context.Context, list func(context.Context, metav1.ListOptions) (L, error)) ([]T, error) {
	pages := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return list(ctx, o) })
	all, _, err := pages.List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	items := make([]T, 0, meta.LenList(all))
	err = meta.EachListItem(all, func(obj runtime.Object) error {
		item, ok := obj.(T)
		if !ok {
			return fmt.Errorf("unexpected %T in a list", obj)
		}
		items = append(items, item)
		return nil
	})
	return items, err
}
