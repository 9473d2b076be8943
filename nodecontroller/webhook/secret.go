package webhook

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"
)

// followSecret watches the one Secret of the pair. It needs no permission to list: a
// watch without a version begins with what is there.
func (s *Server) followSecret(ctx context.Context) {
	name, _ := nameIn(s.cfg.OwnNamespace, s.cfg.CertSecret) // checked by New
	s.keeper.missing(fmt.Errorf("there is no Secret %q yet", name))
	for ctx.Err() == nil {
		err := s.watchSecret(ctx, name)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			err = fmt.Errorf("watching Secret %q: %w", name, err)
			if s.keeper.missing(err) {
				klog.FromContext(ctx).Error(err, "Serving certificates are not followed")
			}
		}
		wait(ctx, s.pace.missing)
	}
}

// watchTime is how long one watch lasts.
const watchTime = 25 * time.Second

// watchSecret offers what is in the Secret until the watch ends, which is no error.
func (s *Server) watchSecret(ctx context.Context, name objectName) error {
	// The clients of a role bound every request. A watch that ends before that is no
	// error, and the next one begins with what is there.
	seconds := int64(watchTime.Seconds())
	events, err := s.deps.Client.CoreV1().Secrets(name.namespace).Watch(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name.name).String(), TimeoutSeconds: &seconds,
	})
	if err != nil {
		return err
	}
	defer events.Stop()
	for event := range events.ResultChan() {
		if event.Type == watch.Error {
			return apierrors.FromObject(event.Object)
		}
		secret, ok := event.Object.(*corev1.Secret)
		if !ok || secret.Name != name.name {
			continue
		}
		s.secretChanged(ctx, name, secret, event.Type == watch.Deleted)
	}
	return nil
}

func (s *Server) secretChanged(ctx context.Context, name objectName, secret *corev1.Secret, gone bool) {
	where := "Secret " + name.String()
	switch cert, key := secret.Data[certName], secret.Data[keyName]; {
	case gone:
		s.keeper.missing(errors.New(where + " was deleted"))
	case len(cert) == 0 && len(key) == 0: // made, and not filled yet
		s.keeper.missing(errors.New(where + " has no " + certName + " and " + keyName))
	default:
		taken, err := s.keeper.offer(cert, key)
		tell(ctx, where, taken, err)
	}
	select {
	case s.changed <- struct{}{}:
	default: // the leader is going to look anyway
	}
}
