// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Package apiread reads each object and each list once, for explain, doctor and audit. A read that fails becomes a finding.
package apiread

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// Result holds the outcome of a read. The zero value stands for a read that was not made.
type Result[T any] struct {
	Value    T
	Found    bool
	Missing  bool  // certainly does not exist
	Unserved bool  // missing because the cluster does not serve the kind
	Err      error // why the value is not found
}

// Found returns the result of a read that returned value.
func Found[T any](value T) Result[T] { return Result[T]{Value: value, Found: true} }

// Reader holds the results of one run. It must not be used concurrently.
type Reader struct {
	timeout time.Duration
	unread  func(finding.Finding)
	results map[string]any // by verb and [Query.What]
}

// New returns a reader. timeout bounds each request, so that one that hangs does not block the report. unread is called with a finding
// of severity unknown for each read that fails; an object that does not exist is no failure.
func New(timeout time.Duration, unread func(finding.Finding)) *Reader {
	return &Reader{timeout: timeout, unread: unread, results: map[string]any{}}
}

// With returns a reader with the results of r, and another function for reads that fail.
func (r *Reader) With(unread func(finding.Finding)) *Reader {
	return &Reader{timeout: r.timeout, unread: unread, results: r.results}
}

// Query describes a read.
type Query struct {
	Topic string // of the finding if the read fails
	What  string // is read, such as `Node "n"`. Equal reads have equal texts
	// Effect is the sentence after the cause of a failure; "": none.
	Effect string
	// Fields and Labels are the selectors of a list.
	Fields, Labels string
}

// Name returns the text of [Query.What] for an object; namespace is "" for an object without one.
func Name(kind, namespace, name string) string {
	if namespace != "" {
		return fmt.Sprintf("%s %s/%s", kind, namespace, name)
	}
	return fmt.Sprintf("%s %q", kind, name)
}

// Getter is the Get method of a typed client.
type Getter[T any] func(context.Context, string, metav1.GetOptions) (T, error)

// Get reads the object called name.
func Get[T any](ctx context.Context, r *Reader, q Query, name string, get Getter[T]) Result[T] {
	return read(r, q, "get", func() (T, error) {
		ctx, cancel := context.WithTimeout(ctx, r.timeout)
		defer cancel()
		return get(ctx, name, metav1.GetOptions{})
	})
}

// List reads all objects that list returns.
func List[T, L runtime.Object](ctx context.Context, r *Reader, q Query, list func(context.Context, metav1.ListOptions) (L, error),
) Result[[]T] {
	return read(r, q, "list", func() ([]T, error) {
		return kube.ListAll[T](ctx, func(ctx context.Context, o metav1.ListOptions) (L, error) {
			ctx, cancel := context.WithTimeout(ctx, r.timeout)
			defer cancel()
			o.FieldSelector, o.LabelSelector = q.Fields, q.Labels
			return list(ctx, o)
		})
	})
}

// read calls request, unless r has its result.
func read[T any](r *Reader, q Query, verb string, request func() (T, error)) Result[T] {
	key := verb + " " + q.What
	if known, ok := r.results[key].(Result[T]); ok {
		return known
	}
	var result Result[T]
	value, err := request()
	switch {
	case err == nil:
		result = Found(value)
	case apierrors.IsNotFound(err):
		result = Result[T]{Missing: true, Unserved: IsUnserved(err), Err: err}
	default:
		result = Result[T]{Err: err}
		r.unread(q.failed(verb, err))
	}
	r.results[key] = result
	return result
}

// failed returns the finding about a read that failed with err.
func (q Query) failed(verb string, err error) finding.Finding {
	cause := err.Error()
	if apierrors.IsForbidden(err) {
		cause = "permission denied"
		if resource := resourceOf(err); resource != "" {
			cause += " (" + verb + " " + resource + ")"
		}
	}
	message := fmt.Sprintf("Cannot %s %s: %s.", verb, q.What, strings.TrimSuffix(cause, "."))
	if q.Effect != "" {
		message += " " + q.Effect
	}
	return finding.Finding{Severity: finding.Unknown, Topic: q.Topic, Message: finding.Printable(message)}
}

// resourceOf returns the resource that err of the API server names; "" if it names none.
func resourceOf(err error) string {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return ""
	}
	d := status.Status().Details
	return schema.GroupResource{Group: d.Group, Resource: d.Kind}.String()
}

// IsUnserved reports whether the API server does not serve a kind, as opposed to an object that does not exist.
func IsUnserved(err error) bool {
	return apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

// Typed returns a [Getter] that decodes what a dynamic client reads.
func Typed[T any](client dynamic.ResourceInterface) Getter[*T] {
	return func(ctx context.Context, name string, o metav1.GetOptions) (*T, error) {
		u, err := client.Get(ctx, name, o)
		if err != nil {
			return nil, err
		}
		return Decode[T](u.Object)
	}
}

// Metadata returns a [Getter] of the metadata of objects.
func Metadata(client metadata.ResourceInterface) Getter[*metav1.PartialObjectMetadata] {
	return func(ctx context.Context, name string, o metav1.GetOptions) (*metav1.PartialObjectMetadata, error) {
		return client.Get(ctx, name, o)
	}
}

// Decode returns an object that a dynamic client has read.
func Decode[T any](object map[string]any) (*T, error) {
	t := new(T)
	return t, runtime.DefaultUnstructuredConverter.FromUnstructured(object, t)
}
