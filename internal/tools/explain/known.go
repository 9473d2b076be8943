package explain

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// known is what a read has told. The zero value was not asked for.
type known[T any] struct {
	value T
	found bool
	asked bool
	why   string // why it is not known whether there is one: a part of a sentence
	// unserved is that the cluster does not have the kind, so that there is none for sure.
	unserved bool
}

// have is an answer that somebody else has given.
func have[T any](value T) known[T] { return known[T]{value: value, found: true, asked: true} }

// absent tells whether it is sure that there is none.
func (k known[T]) absent() bool { return k.asked && !k.found && k.why == "" }

// read asks for what, such as `get StorageClass "fast"`, within the time of one request.
func read[T any](ctx context.Context, what string, ask func(context.Context) (T, error)) known[T] {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	value, err := ask(ctx)
	switch {
	case err == nil:
		return have(value)
	case noKind(err):
		return known[T]{asked: true, unserved: true}
	case apierrors.IsNotFound(err):
		return known[T]{asked: true}
	case apierrors.IsForbidden(err):
		return known[T]{asked: true, why: "not known: no permission to " + what}
	}
	return known[T]{asked: true, why: fmt.Sprintf("not known: the attempt to %s failed: %v", what, err)}
}

// requestTimeout bounds one read, so that the rest is told even if one hangs.
const requestTimeout = 15 * time.Second

// noKind tells whether the API server has said that it does not serve a kind, rather than
// that there is no object of that name.
func noKind(err error) bool {
	return apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}
