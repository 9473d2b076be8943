// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiread

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// collected holds the findings about reads that failed.
type collected []finding.Finding

func (c *collected) add(f finding.Finding) { *c = append(*c, f) }

var csiNodes = schema.GroupResource{Group: "storage.k8s.io", Resource: "csinodes"}

func TestOutcomes(t *testing.T) {
	t.Parallel()
	boom, effect := errors.New("boom.\nlog"), "Nothing was compared."
	notFound := apierrors.NewNotFound(csiNodes, "n")
	unserved := apierrors.NewGenericServerResponse(404, "get", csiNodes, "n", "page not found", 0, true)
	forbidden := apierrors.NewForbidden(csiNodes, "n", errors.New("no"))
	for name, tt := range map[string]struct {
		err               error
		missing, unserved bool
		want              string // of the finding; "" if there is none
	}{
		"found":     {nil, false, false, ""},
		"missing":   {notFound, true, false, ""},
		"unserved":  {unserved, true, true, ""},
		"forbidden": {forbidden, false, false, `Cannot get CSINode "n": permission denied (get csinodes.storage.k8s.io). ` + effect},
		"failed":    {boom, false, false, `Cannot get CSINode "n": boom. log. ` + effect},
	} {
		var unread collected
		q := Query{Topic: "node", What: Name("CSINode", "", "n"), Effect: effect}
		get := func(_ context.Context, name string, _ metav1.GetOptions) (*corev1.Node, error) {
			return &corev1.Node{}, tt.err
		}
		got := Get(t.Context(), New(time.Minute, unread.add), q, "n", get)
		isFound := tt.err == nil
		if got.Found != isFound || (got.Value != nil) != isFound || got.Missing != tt.missing || got.Unserved != tt.unserved ||
			!errors.Is(got.Err, tt.err) {
			t.Errorf("%s: %+v", name, got)
		}
		if want := (finding.Finding{Severity: finding.Unknown, Topic: "node", Message: tt.want}); tt.want == "" && unread != nil ||
			tt.want != "" && !slices.Equal(unread, collected{want}) {
			t.Errorf("%s: %+v", name, unread)
		}
	}
}

// TestOnce: each object and each list is read once, also by readers that share the results. A failure has one finding.
func TestOnce(t *testing.T) {
	t.Parallel()
	var first, second collected
	r := New(time.Minute, first.add)
	var requests []metav1.ListOptions
	list := func(_ context.Context, o metav1.ListOptions) (*corev1.PodList, error) {
		requests = append(requests, o)
		if o.LabelSelector != "" {
			return nil, errors.New("boom")
		}
		return &corev1.PodList{Items: make([]corev1.Pod, 2)}, nil
	}
	for _, reader := range []*Reader{r, r.With(second.add)} {
		pods := List[*corev1.Pod](t.Context(), reader, Query{What: "Pods", Fields: "spec.nodeName=n"}, list)
		labeled := List[*corev1.Pod](t.Context(), reader, Query{What: "labeled Pods", Labels: "a=b"}, list)
		if len(pods.Value) != 2 || !pods.Found || labeled.Found || labeled.Err == nil {
			t.Errorf("%+v, %+v", pods, labeled)
		}
	}
	if len(requests) != 2 || requests[0].FieldSelector != "spec.nodeName=n" || len(first) != 1 || second != nil {
		t.Errorf("requests %+v, unread %+v and %+v", requests, first, second)
	}
}

// TestTimeout: a request that hangs ends after the timeout. Each page of a list has its own.
func TestTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pages := 0
		list := func(ctx context.Context, o metav1.ListOptions) (*corev1.PodList, error) {
			pages++
			if pages == 3 {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			time.Sleep(40 * time.Second)
			return &corev1.PodList{ListMeta: metav1.ListMeta{Continue: "next"}, Items: make([]corev1.Pod, 1)}, nil
		}
		var unread collected
		begin := time.Now()
		got := List[*corev1.Pod](t.Context(), New(time.Minute, unread.add), Query{What: "Pods"}, list)
		if took := time.Since(begin); got.Found || !errors.Is(got.Err,
			context.DeadlineExceeded) || took != 140*time.Second || len(unread) != 1 {
			t.Errorf("%+v after %v", got, took)
		}
	})
}
