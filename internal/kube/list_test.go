// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// podPages answers lists of the pods a, b and c with pages of two. The second page fails with
// err unless that is nil.
func podPages(err error) func(context.Context, metav1.ListOptions) (*corev1.PodList, error) {
	pods := func(next string, names ...string) *corev1.PodList {
		list := &corev1.PodList{ListMeta: metav1.ListMeta{Continue: next}}
		for _, name := range names {
			list.Items = append(list.Items, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
		return list
	}
	return func(_ context.Context, o metav1.ListOptions) (*corev1.PodList, error) {
		switch {
		case o.Continue != "" && err != nil:
			return nil, err
		case o.Continue != "":
			return pods("", "c"), nil
		case o.Limit > 0:
			return pods("token", "a", "b"), nil
		}
		return pods("", "a", "b", "c"), nil
	}
}

func TestListAll(t *testing.T) {
	failed := errors.New("connection refused")
	for name, tt := range map[string]struct{ second, want error }{
		"every page":                 {nil, nil},
		"the continue token expired": {apierrors.NewResourceExpired("The provided continue parameter is too old"), nil},
		"another error":              {failed, failed},
	} {
		pods, err := ListAll[*corev1.Pod](t.Context(), podPages(tt.second))
		var names []string
		for _, pod := range pods {
			names = append(names, pod.Name)
		}
		if !errors.Is(err, tt.want) || err == nil && !slices.Equal(names, []string{"a", "b", "c"}) {
			t.Errorf("%s: %s, %v", name, strings.Join(names, " "), err)
		}
	}
}
