// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package servingcert

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

const (
	// annService marks a Secret that this program may overwrite. Its value is the Service.
	annService = "storage-controller.io/webhook-certificate"
	// The keys of a pair whose authority API servers may not trust yet.
	nextCertName = "next.crt"
	nextKeyName  = "next.key"

	renewTimeout = time.Minute
)

// Lead renews a self-signed certificate until ctx ends; in the other modes it only waits. Only the
// leader runs it. Without a pair, every replica generates one, see [Manager.Run].
func (m *Manager) Lead(ctx context.Context) error {
	if m.cfg.Mode != SelfSigned {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	wait.UntilWithContext(klog.NewContext(ctx, klog.FromContext(ctx).WithName("serving-certificate")), m.renewLogged, m.renewal)
	return context.Cause(ctx)
}

// renewLogged calls renew, and counts and logs its error.
func (m *Manager) renewLogged(ctx context.Context) {
	m.renewing.Lock()
	defer m.renewing.Unlock()
	problem := ""
	if err := m.renew(ctx); err != nil && ctx.Err() == nil {
		m.renewals.WithLabelValues("error").Inc()
		problem = err.Error()
		if problem != m.notRenewed { // not in every round
			klog.FromContext(ctx).Error(err, "Renewing the serving certificate failed, retrying")
		}
	}
	m.notRenewed = problem
}

// renew takes the next step of a renewal. See the package comment.
func (m *Manager) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	secret, err := m.readSecret(ctx)
	if err != nil {
		return err
	}
	have, next := parsePair(secret.Data[certName], secret.Data[keyName]), parsePair(secret.Data[nextCertName], secret.Data[nextKeyName])
	switch now := m.now(); {
	case fresh(have, m.hosts, now):
		_, err := m.publish(ctx, have, m.current.Load())
		return err
	case !fresh(next, m.hosts, now):
		certs, key, err := generate(m.hosts, m.lifetime)
		if err != nil {
			return fmt.Errorf("generating a serving certificate: %w", err)
		}
		secret.Data = map[string][]byte{
			certName: secret.Data[certName], keyName: secret.Data[keyName], nextCertName: certs, nextKeyName: key,
		}
		return m.write(ctx, secret, "Serving certificate generated")
	}
	again := m.announced == string(next.Certificate[0])
	trusted, err := m.publish(ctx, next, have, m.current.Load())
	if again && !trusted && err == nil {
		err = fmt.Errorf("publishing the authority of the serving certificate: another program removes it from caBundle of "+
			"MutatingWebhookConfiguration %q. Exclude the field there", m.cfg.WebhookConfig)
	}
	served := have != nil && validAt(have, m.now()) == nil || m.Ready() == nil
	if !trusted && (served || !again && !kube.IsRefused(err)) {
		return err // other replicas may still serve a trusted pair; a refusal may last, and without a valid pair calls fail anyway
	}
	secret.Data = map[string][]byte{certName: secret.Data[nextCertName], keyName: secret.Data[nextKeyName]}
	return errors.Join(err, m.write(ctx, secret, "Serving certificate renewed"))
}

// publish adds the authorities of pairs to the CA bundles of the own webhooks. It reports whether the pairs may be
// served now: API servers had the authorities before, or trusted none.
func (m *Manager) publish(ctx context.Context, pairs ...*tls.Certificate) (trusted bool, err error) {
	configs := m.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	config, err := configs.Get(ctx, m.cfg.WebhookConfig, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err):
		return true, nil // it may be created later
	case err != nil:
		return false, fmt.Errorf("reading MutatingWebhookConfiguration %q: %w", m.cfg.WebhookConfig, err)
	}
	// An authority that another leader has added since the read would be lost.
	ops := []map[string]any{{"op": "test", "path": "/metadata/resourceVersion", "value": config.ResourceVersion}}
	trusted, found := true, false
	for i, w := range config.Webhooks {
		if !m.isOwn(w) {
			continue
		}
		found = true
		bundle, trusts, err := bundleWith(w.ClientConfig.CABundle, m.now(), pairs...)
		if err != nil {
			return false, fmt.Errorf("encoding the CA bundle: %w", err)
		}
		if bundle != nil {
			trusted = trusted && !trusts
			ops = append(ops, map[string]any{"op": "add", "path": fmt.Sprintf("/webhooks/%d/clientConfig/caBundle", i), "value": bundle})
		}
	}
	switch {
	case !found:
		return true, fmt.Errorf("MutatingWebhookConfiguration %q, Service %q: no webhook with the Service in clientConfig. "+
			"Set --webhook-config-name and --webhook-service to the names of your own", config.Name, m.service)
	case len(ops) == 1:
		return true, nil
	}
	patch, err := json.Marshal(ops)
	if err == nil {
		_, err = configs.Patch(ctx, config.Name, types.JSONPatchType, patch, metav1.PatchOptions{})
	}
	switch {
	case kube.IsPatchTestFailed(err), apierrors.IsConflict(err):
		return false, nil // the next round reads it again
	case err != nil:
		return false, fmt.Errorf("patching caBundle of MutatingWebhookConfiguration %q: %w", config.Name, err)
	}
	m.announced = string(pairs[0].Certificate[0])
	m.renewals.WithLabelValues("ok").Inc()
	klog.FromContext(ctx).Info("Authority of the serving certificate published", "mutatingWebhookConfiguration", config.Name)
	return trusted, nil
}

// isOwn reports whether w calls the Service. The others belong to other programs, which the
// authority of this one would cut off.
func (m *Manager) isOwn(w admissionregistrationv1.MutatingWebhook) bool {
	s := w.ClientConfig.Service
	return s != nil && s.Namespace == m.service.Namespace && s.Name == m.service.Name
}

// readSecret returns the Secret, or an empty one without resourceVersion if it does not exist.
func (m *Manager) readSecret(ctx context.Context) (*corev1.Secret, error) {
	secret, err := m.client.CoreV1().Secrets(m.secret.Namespace).Get(ctx, m.secret.Name, metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err):
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: m.secret.Namespace, Name: m.secret.Name}}, nil
	case err != nil:
		return nil, fmt.Errorf("reading Secret %q: %w", m.secret, err)
	case len(secret.Data) > 0 && secret.Annotations[annService] == "":
		return nil, fmt.Errorf("writing the certificate: Secret %q has data but no annotation %s: another program may need it. "+
			"Delete it, or set --webhook-cert-secret to another name", m.secret, annService)
	case len(secret.Data) > 0 && m.written && secret.Annotations[annService] != m.service.String():
		return nil, fmt.Errorf("writing the certificate: another process has replaced it in Secret %q with that of Service %q. "+
			"Set --webhook-cert-secret to another name for each driver", m.secret, secret.Annotations[annService])
	}
	return secret, nil
}

// write stores secret and logs message. If another leader was faster, its pair stays.
func (m *Manager) write(ctx context.Context, secret *corev1.Secret, message string) error {
	metav1.SetMetaDataAnnotation(&secret.ObjectMeta, annService, m.service.String())
	secrets := m.client.CoreV1().Secrets(m.secret.Namespace)
	var err error
	if secret.ResourceVersion == "" {
		_, err = secrets.Create(ctx, secret, metav1.CreateOptions{})
	} else {
		_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{})
	}
	switch {
	case apierrors.IsAlreadyExists(err), apierrors.IsConflict(err):
		return nil // the next round reads it again
	case err != nil:
		return fmt.Errorf("writing Secret %q: %w", m.secret, err)
	}
	m.written = true
	m.renewals.WithLabelValues("ok").Inc()
	klog.FromContext(ctx).Info(message, "secret", m.secret.String())
	return nil
}
