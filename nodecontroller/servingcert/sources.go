package servingcert

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
)

// The keys of a pair in a Secret, and its files in a directory.
const (
	certName      = corev1.TLSCertKey
	keyName       = corev1.TLSPrivateKeyKey
	authorityName = corev1.ServiceAccountRootCAKey
)

// followFiles loads the pair in the directory, again and again. It polls because the kubelet
// updates a mounted Secret by replacing a symbolic link, which a watch of the files misses.
func (m *Manager) followFiles(ctx context.Context) {
	for ctx.Err() == nil {
		cert, key, err := readPair(m.cfg.Dir)
		if err != nil {
			m.unavailable(ctx, err)
			wait(ctx, m.pace.missing)
			continue
		}
		m.load(ctx, m.cfg.Dir, cert, key)
		wait(ctx, m.pace.files)
	}
}

// readPair reads both files. It fails if they are replaced meanwhile: an old certificate and a new key
// do not match.
func readPair(dir string) (cert, key []byte, err error) {
	var content [3][]byte
	for i, name := range []string{certName, keyName, certName} {
		if content[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
			return nil, nil, err
		}
	}
	if !bytes.Equal(content[0], content[2]) {
		return nil, nil, fmt.Errorf("%s was replaced while it was read", filepath.Join(dir, certName))
	}
	return content[0], content[1], nil
}

// followSecret loads the pair in the Secret whenever it changes.
func (m *Manager) followSecret(ctx context.Context) {
	m.unavailable(ctx, fmt.Errorf("reading the certificate: Secret %q is not found", m.secret))
	for ctx.Err() == nil {
		if err := m.watchSecret(ctx); err != nil && ctx.Err() == nil {
			m.unavailable(ctx, fmt.Errorf("watching Secret %q: %w", m.secret, err))
		}
		wait(ctx, m.pace.missing)
	}
}

// watchTime bounds one watch, because the clients of a role bound every request.
const watchTime = 25 * time.Second

// watchSecret loads the pair in the Secret until the watch ends. It needs no permission to list: a
// watch without a resourceVersion begins with the current object.
func (m *Manager) watchSecret(ctx context.Context) error {
	seconds := int64(watchTime.Seconds())
	events, err := m.client.CoreV1().Secrets(m.secret.Namespace).Watch(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, m.secret.Name).String(), TimeoutSeconds: &seconds,
	})
	if err != nil {
		return err
	}
	defer events.Stop()
	for event := range events.ResultChan() {
		if event.Type == watch.Error {
			return apierrors.FromObject(event.Object)
		}
		if secret, ok := event.Object.(*corev1.Secret); ok && secret.Name == m.secret.Name {
			m.secretChanged(ctx, secret, event.Type == watch.Deleted)
		}
	}
	return nil
}

// secretChanged loads the pair of secret and wakes the leader.
func (m *Manager) secretChanged(ctx context.Context, secret *corev1.Secret, deleted bool) {
	switch cert, key := secret.Data[certName], secret.Data[keyName]; {
	case deleted:
		m.unavailable(ctx, fmt.Errorf("reading the certificate: Secret %q was deleted", m.secret))
	case len(cert) == 0 && len(key) == 0: // created, and not filled yet
		m.unavailable(ctx, fmt.Errorf("reading the certificate: Secret %q has no %s and %s", m.secret, certName, keyName))
	default:
		m.load(ctx, "Secret "+m.secret.String(), cert, key)
	}
	select {
	case m.changed <- struct{}{}:
	default: // the leader is going to look anyway
	}
}
