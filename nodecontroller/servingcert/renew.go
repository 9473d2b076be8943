package servingcert

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

const (
	// annService marks a Secret that this program may overwrite. Its value is the Service.
	annService = "storage-controller.io/webhook-certificate"
	// retain is for how long earlier authorities stay published after a renewal, for replicas that
	// have not loaded the new pair.
	retain       = time.Hour
	renewTimeout = time.Minute
	// attempts bounds the repetitions after conflicts with another writer.
	attempts = 5
)

// Lead renews a self-signed certificate until ctx ends; in the other modes it only waits. Only the
// leader runs it.
func (m *Manager) Lead(ctx context.Context) error {
	if m.cfg.Mode != SelfSigned {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithName("serving-certificate"))
	logged := ""
	for ctx.Err() == nil {
		switch err := m.renew(ctx); {
		case err == nil:
			logged = ""
		case ctx.Err() == nil:
			m.metrics.renewals.WithLabelValues(result(err)).Inc()
			if err.Error() != logged { // not in every round
				klog.FromContext(ctx).Error(err, "Renewing the serving certificate failed, retrying")
			}
			logged = err.Error()
		}
		timer := time.NewTimer(m.pace.renew)
		select {
		case <-ctx.Done():
		case <-m.changed:
		case <-timer.C:
		}
		timer.Stop()
	}
	return context.Cause(ctx)
}

// renew stores a new pair unless the Secret has one with a third of its lifetime left. API servers
// trust the new authority before the pair is stored. See the package comment.
func (m *Manager) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	secret, err := m.readSecret(ctx)
	if err != nil {
		return err
	}
	now := m.now()
	have := parsePair(secret.Data[certName], secret.Data[keyName], secret.Data[authorityName])
	if have.fresh(m.hosts, now) {
		_, err := m.publish(ctx, m.inUse(have), have.age(now) > retain)
		return err
	}
	next, err := generate(m.hosts, m.lifetime)
	if err != nil {
		return fmt.Errorf("generating a serving certificate: %w", err)
	}
	served := have.valid(now) || m.Ready() == nil
	if err := m.announce(ctx, next, have); err != nil && served {
		return err
	} // without a valid pair the calls of API servers fail anyway
	return m.store(ctx, secret, next)
}

// announce publishes the authority of next and returns when API servers trust it.
func (m *Manager) announce(ctx context.Context, next, have *pair) error {
	for range attempts {
		needsTime, err := m.publish(ctx, m.inUse(next, have), false)
		if errors.Is(err, errNoWebhook) {
			return nil // the next round reports it
		}
		if err != nil || !needsTime {
			return err
		}
		if wait(ctx, m.pace.settle); ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return fmt.Errorf("MutatingWebhookConfiguration %q: another program removes the authority. Stop it from writing caBundle",
		m.cfg.WebhookConfig)
}

// inUse returns the authorities of pairs, and of the pair that this replica serves.
func (m *Manager) inUse(pairs ...*pair) (authorities []*x509.Certificate) {
	add := func(c *x509.Certificate) {
		if c != nil && !slices.ContainsFunc(authorities, c.Equal) {
			authorities = append(authorities, c)
		}
	}
	for _, p := range pairs {
		if p != nil {
			add(p.authority)
		}
	}
	if served := m.current.Load(); served != nil && len(served.Certificate) > 1 {
		c, _ := x509.ParseCertificate(served.Certificate[1]) // nil after an error
		add(c)
	}
	return authorities
}

// errNoWebhook means that no webhook of the configuration calls the Service.
var errNoWebhook = errors.New("no webhook with the Service in clientConfig. " +
	"Set --webhook-config-name and --webhook-service to the names of your own")

// publish adds the required authorities to the CA bundles of the own webhooks. With prune it removes
// all others. It reports whether API servers trusted something else before the write, so that the
// replacement of a pair has to wait.
func (m *Manager) publish(ctx context.Context, required []*x509.Certificate, prune bool) (needsTime bool, err error) {
	configs := m.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	for range attempts {
		config, err := configs.Get(ctx, m.cfg.WebhookConfig, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return false, nil // it may be created later
		case err != nil:
			return false, fmt.Errorf("reading MutatingWebhookConfiguration %q: %w", m.cfg.WebhookConfig, err)
		case !slices.ContainsFunc(config.Webhooks, m.isOwn):
			return false, fmt.Errorf("MutatingWebhookConfiguration %q, Service %q: %w", config.Name, m.service, errNoWebhook)
		}
		patch, needsTime, err := m.bundlePatch(config, required, prune)
		if err != nil || patch == nil {
			return false, err
		}
		_, err = configs.Patch(ctx, config.Name, types.JSONPatchType, patch, metav1.PatchOptions{})
		switch {
		case err == nil:
			m.metrics.renewals.WithLabelValues(result(nil)).Inc()
			klog.FromContext(ctx).Info("Authority of the serving certificate published", "mutatingWebhookConfiguration", config.Name)
			return needsTime, nil
		case !kube.IsPatchTestFailed(err) && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err):
			return false, fmt.Errorf("patching caBundle of MutatingWebhookConfiguration %q: %w", config.Name, err)
		}
	}
	return false, fmt.Errorf("patching caBundle of MutatingWebhookConfiguration %q: it was modified %d times meanwhile",
		m.cfg.WebhookConfig, attempts)
}

// isOwn reports whether w calls the Service. The others belong to other programs, which the
// authority of this one would cut off.
func (m *Manager) isOwn(w admissionregistrationv1.MutatingWebhook) bool {
	s := w.ClientConfig.Service
	return s != nil && s.Namespace == m.service.Namespace && s.Name == m.service.Name
}

// patchOp is one operation of a JSON patch.
type patchOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// bundlePatch returns the patch that brings the bundles of the own webhooks up to date, nil if
// they are. It fails if config has changed since it was read: an authority of another leader
// would be lost.
func (m *Manager) bundlePatch(
	config *admissionregistrationv1.MutatingWebhookConfiguration, required []*x509.Certificate, prune bool,
) (patch []byte, trusted bool, err error) {
	ops := []patchOp{{"test", "/metadata/resourceVersion", config.ResourceVersion}}
	for i, w := range config.Webhooks {
		if !m.isOwn(w) {
			continue
		}
		have := parseCerts(w.ClientConfig.CABundle)
		trusted = trusted || len(have) > 0
		if want, changed := bundleWith(have, required, prune, m.now()); changed {
			ops = append(ops, patchOp{"add", fmt.Sprintf("/webhooks/%d/clientConfig/caBundle", i), encodeCerts(want...)})
		}
	}
	if len(ops) == 1 {
		return nil, trusted, nil
	}
	patch, err = json.Marshal(ops)
	return patch, trusted, err
}

// readSecret returns the Secret, or an empty one without resourceVersion if it does not exist.
func (m *Manager) readSecret(ctx context.Context) (*corev1.Secret, error) {
	secret, err := m.client.CoreV1().Secrets(m.secret.Namespace).Get(ctx, m.secret.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: m.secret.Namespace, Name: m.secret.Name}}, nil
	case err != nil:
		return nil, fmt.Errorf("reading Secret %q: %w", m.secret, err)
	case len(secret.Data) > 0 && secret.Annotations[annService] == "":
		return nil, fmt.Errorf("writing the certificate: Secret %q has data but no annotation %s: another program may need it. "+
			"Delete it, or set --webhook-cert-secret to another name", m.secret, annService)
	}
	return secret, nil
}

// store writes next into the Secret as it was read. If another leader was faster, its pair stays.
func (m *Manager) store(ctx context.Context, read *corev1.Secret, next *pair) error {
	secret := read.DeepCopy()
	metav1.SetMetaDataAnnotation(&secret.ObjectMeta, annService, m.service.String())
	secret.Data = map[string][]byte{certName: next.cert, keyName: next.key, authorityName: encodeCerts(next.authority)}
	secrets := m.client.CoreV1().Secrets(m.secret.Namespace)
	var err error
	if read.ResourceVersion == "" {
		secret.Type = corev1.SecretTypeOpaque
		_, err = secrets.Create(ctx, secret, metav1.CreateOptions{})
	} else {
		_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{})
	}
	switch {
	case apierrors.IsAlreadyExists(err), apierrors.IsConflict(err), read.ResourceVersion != "" && apierrors.IsNotFound(err):
		return nil // the next round reads it again
	case err != nil:
		return fmt.Errorf("writing Secret %q: %w", m.secret, err)
	}
	m.metrics.renewals.WithLabelValues(result(nil)).Inc()
	klog.FromContext(ctx).Info("Serving certificate renewed", "secret", m.secret.String(), "notAfter", next.served.Leaf.NotAfter)
	return nil
}
