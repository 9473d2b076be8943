// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"testing"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestDefaultClass(t *testing.T) {
	day := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	class := func(name string, age int, annotation string) *storagev1.StorageClass {
		c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(day.AddDate(0, 0, -age))}}
		if annotation != "" {
			c.Annotations = map[string]string{annotation: "true"}
		}
		return c
	}
	const ga, beta = AnnotationDefaultClass, annBetaDefaultClass
	for name, c := range map[string]struct {
		list []*storagev1.StorageClass
		want string
	}{
		"none":                {[]*storagev1.StorageClass{class("a", 1, "")}, ""},
		"one":                 {[]*storagev1.StorageClass{class("a", 1, ""), class("b", 2, ga)}, "b"},
		"the beta annotation": {[]*storagev1.StorageClass{class("b", 2, beta)}, "b"},
		"the newest":          {[]*storagev1.StorageClass{class("c", 3, ga), class("a", 1, ga), class("b", 2, ga)}, "a"},
		"the first by name":   {[]*storagev1.StorageClass{class("b", 1, ga), class("a", 1, ga), class("c", 1, ga)}, "a"},
	} {
		got := ""
		if name := DefaultClass(c.list); name != nil {
			got = *name
		}
		if got != c.want {
			t.Errorf("%s: the default is %q, want %q", name, got, c.want)
		}
	}
}
