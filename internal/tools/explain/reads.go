// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// result holds the outcome of one read. The zero value stands for a read that was not made.
type result[T any] struct {
	value    T
	found    bool
	missing  bool // certainly does not exist
	unserved bool // missing because the cluster does not serve the kind
}

func found[T any](value T) result[T] { return result[T]{value: value, found: true} }

// requestTimeout bounds one read, so that one read that hangs does not block the report.
const requestTimeout = 15 * time.Second

// read calls request, once for each what, which names the request, such as `get Node "n1"`. A failure becomes a finding about topic.
func read[T any](ctx context.Context, f *facts, topic, what string, request func(context.Context) (T, error)) (r result[T]) {
	if known, ok := f.reads[what].(result[T]); ok {
		return known
	}
	defer func() { f.reads[what] = r }()
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	value, err := request(ctx)
	switch {
	case err == nil:
		return found(value)
	case apierrors.IsNotFound(err):
		return result[T]{missing: true, unserved: isUnserved(err)}
	case apierrors.IsForbidden(err):
		f.unread = append(f.unread, finding.Finding{Severity: finding.Unknown, Topic: topic,
			Message: "Cannot " + what + ": permission denied."})
	default:
		f.unread = append(f.unread, finding.Finding{
			Severity: finding.Unknown, Topic: topic, Message: sentence(fmt.Sprintf("Cannot %s: %v", what, err)),
		})
	}
	return result[T]{}
}

// getter is the Get method of a typed client.
type getter[T any] func(context.Context, string, metav1.GetOptions) (T, error)

// get reads the object with the name in target.
func get[T any](ctx context.Context, f *facts, topic string, target Request, request getter[T]) result[T] {
	return read(ctx, f, topic, "get "+target.String(), func(ctx context.Context) (T, error) {
		return request(ctx, target.Name, metav1.GetOptions{})
	})
}

// lister is the List method of a typed client.
type lister[L any] func(context.Context, metav1.ListOptions) (L, error)

// list reads all objects that request lists. what names them, such as Nodes.
func list[T, L runtime.Object](ctx context.Context, f *facts, topic, what string, request lister[L]) result[[]T] {
	return read(ctx, f, topic, "list "+what, func(ctx context.Context) ([]T, error) { return kube.ListAll[T](ctx, request) })
}

// selecting returns request with a field selector.
func selecting[L any](request lister[L], fields string) lister[L] {
	return func(ctx context.Context, o metav1.ListOptions) (L, error) {
		o.FieldSelector = fields
		return request(ctx, o)
	}
}

// typed returns a getter that decodes what a dynamic client reads.
func typed[T any](client dynamic.ResourceInterface) getter[*T] {
	return func(ctx context.Context, name string, o metav1.GetOptions) (*T, error) {
		u, err := client.Get(ctx, name, o)
		if err != nil {
			return nil, err
		}
		return decode[T](u.Object)
	}
}

func decode[T any](object map[string]any) (*T, error) {
	t := new(T)
	return t, runtime.DefaultUnstructuredConverter.FromUnstructured(object, t)
}

// objectName returns kind, namespace and name for a message.
func objectName(kind, namespace, name string) string {
	if namespace != "" {
		return fmt.Sprintf("%s %s/%s", kind, namespace, name)
	}
	return fmt.Sprintf("%s %q", kind, name)
}
