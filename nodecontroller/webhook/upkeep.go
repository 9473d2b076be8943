package webhook

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"maps"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// Lead is the work of the leader: in mode self-signed it makes the certificates, renews
// them and publishes their authority. It returns when ctx ends.
func (s *Server) Lead(ctx context.Context) error {
	if s.cfg.CertMode != CertSelfSigned {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithName("webhook-certificates"))
	secret, _ := nameIn(s.cfg.OwnNamespace, s.cfg.CertSecret) // both checked by New
	service, _ := nameIn(s.cfg.OwnNamespace, s.cfg.Service)
	u := &upkeep{s: s, secret: secret, service: service}
	for ctx.Err() == nil {
		u.round(ctx)
		again := time.NewTimer(s.pace.upkeep)
		select {
		case <-ctx.Done():
		case <-s.changed:
		case <-again.C:
		}
		again.Stop()
	}
	return context.Cause(ctx)
}

// upkeep is the work of one term. What it remembers is only for how long the API
// servers know an authority, and begins anew with each term.
type upkeep struct {
	s               *Server
	secret, service objectName
	authority       *x509.Certificate // which published is about
	published       time.Time
	lastError       string
}

// upkeepTimeout bounds the reads and the write of one step.
const upkeepTimeout = 30 * time.Second

// round takes steps until there is nothing to do, or one fails.
func (u *upkeep) round(ctx context.Context) {
	const steps = 6 // create, publish, sign and publish again; and what others do meanwhile
	for range steps {
		more, err := u.step(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			u.s.metrics.upkeep.WithLabelValues(result(err)).Inc()
			if err.Error() != u.lastError { // and not every ten seconds
				klog.FromContext(ctx).Error(err, "The certificate of the webhooks is not kept up, trying again")
			}
			u.lastError = err.Error()
			return
		}
		u.lastError = ""
		if !more {
			return
		}
		u.s.metrics.upkeep.WithLabelValues(result(nil)).Inc()
	}
}

// step gathers, decides and makes one write; false when there is nothing to do.
func (u *upkeep) step(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, upkeepTimeout)
	defer cancel()
	secret, err := u.readSecret(ctx)
	if err != nil {
		return false, err
	}
	config, configErr := u.readConfig(ctx)
	facts := u.facts(secret, config)
	facts.unknown = configErr != nil
	facts.published = u.notePublished(facts)
	action, reason := decideUpkeep(facts)
	klog.FromContext(ctx).V(2).Info("Decided", "action", action.String(), "reason", reason)
	var data map[string][]byte
	switch action {
	case doNothing:
		if configErr == nil {
			configErr = u.missesOwn(config)
		}
		return false, configErr
	case doPublish:
		return true, u.publish(ctx, config, facts)
	case doCreateAuthority:
		data, err = facts.withNewAuthority()
	case doSign:
		data, err = facts.withNewPair()
	}
	if err == nil {
		err = u.write(ctx, secret, data)
	}
	if err == nil {
		klog.FromContext(ctx).Info("Certificates of the webhooks renewed", "secret", u.secret.String(), "action", action.String(), "reason", reason)
	}
	return true, err
}

func (u *upkeep) facts(secret *corev1.Secret, config *admissionregistrationv1.MutatingWebhookConfiguration) upkeepFacts {
	f := upkeepFacts{
		now: u.s.keeper.now(), names: u.s.cfg.serviceNames(u.service), settle: u.s.pace.settle,
		held: parseAuthority(secret.Data), serving: u.s.keeper.ready() == nil,
	}
	for _, i := range u.own(config) {
		f.bundles = append(f.bundles, parseCerts(config.Webhooks[i].ClientConfig.CABundle))
	}
	return f
}

// own is where the webhooks of the Service are in config, which may be nil. The others
// belong to somebody else, whom the authority of this one would cut off.
func (u *upkeep) own(config *admissionregistrationv1.MutatingWebhookConfiguration) (indices []int) {
	if config == nil {
		return nil
	}
	for i, w := range config.Webhooks {
		if s := w.ClientConfig.Service; s != nil && s.Namespace == u.service.namespace && s.Name == u.service.name {
			indices = append(indices, i)
		}
	}
	return indices
}

// missesOwn says that config, which may be nil, has no webhook of the Service: what the
// API server calls by it does not trust the authority.
func (u *upkeep) missesOwn(config *admissionregistrationv1.MutatingWebhookConfiguration) error {
	if config == nil || len(u.own(config)) > 0 {
		return nil
	}
	return fmt.Errorf("MutatingWebhookConfiguration %q has no webhook with clientConfig.service %s, and the others are left as they are: set --webhook-config-name and --webhook-service to the names of your own", config.Name, u.service)
}

// notePublished is since when the authority of f is known to be published.
func (u *upkeep) notePublished(f upkeepFacts) time.Time {
	switch {
	case !f.isPublished():
		u.authority = nil
		return time.Time{}
	case u.authority == nil || !u.authority.Equal(f.held.cas[0]):
		u.authority, u.published = f.held.cas[0], f.now
	}
	return u.published
}

// readSecret is the Secret, an empty one without resourceVersion where there is none.
func (u *upkeep) readSecret(ctx context.Context) (*corev1.Secret, error) {
	secret, err := u.s.deps.Client.CoreV1().Secrets(u.secret.namespace).Get(ctx, u.secret.name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: u.secret.namespace, Name: u.secret.name}}, nil
	case err != nil:
		return nil, fmt.Errorf("reading Secret %q: %w", u.secret, err)
	case !isOurs(secret):
		return nil, fmt.Errorf("the data of Secret %q may be needed by somebody else, as it has no annotation %s: delete it, or set --webhook-cert-secret to another name", u.secret, annService)
	}
	return secret, nil
}

// readConfig is the configuration; nil where there is none, which may still come.
func (u *upkeep) readConfig(ctx context.Context) (*admissionregistrationv1.MutatingWebhookConfiguration, error) {
	config, err := u.s.deps.Client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(ctx, u.s.cfg.ConfigName, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading MutatingWebhookConfiguration %q: %w", u.s.cfg.ConfigName, err)
	}
	return config, nil
}

// write puts data into the Secret as it was read. Where another leader was faster,
// what that wrote counts.
func (u *upkeep) write(ctx context.Context, read *corev1.Secret, data map[string][]byte) error {
	secret := read.DeepCopy()
	if secret.Annotations == nil {
		secret.Annotations = map[string]string{}
	}
	secret.Annotations[annService] = u.service.String()
	if secret.Data == nil {
		secret.Data = map[string][]byte{}
	}
	maps.Copy(secret.Data, data)
	secrets := u.s.deps.Client.CoreV1().Secrets(u.secret.namespace)
	var err error
	if read.ResourceVersion == "" {
		secret.Type = corev1.SecretTypeOpaque
		_, err = secrets.Create(ctx, secret, metav1.CreateOptions{})
	} else {
		_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{})
	}
	switch {
	case apierrors.IsAlreadyExists(err), apierrors.IsConflict(err), read.ResourceVersion != "" && apierrors.IsNotFound(err):
		return nil // the next step reads it again
	case err != nil:
		return fmt.Errorf("writing Secret %q: %w", u.secret, err)
	}
	return nil
}

// testOp is a test operation of a JSON patch.
type testOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// publish writes the bundles that are wanted into the own webhooks of config, and nothing
// else of it.
func (u *upkeep) publish(ctx context.Context, config *admissionregistrationv1.MutatingWebhookConfiguration, f upkeepFacts) error {
	ops := []any{testOp{"test", "/metadata/uid", config.UID}}
	for n, i := range u.own(config) {
		have := f.bundles[n]
		want := f.wanted(have)
		if sameCerts(have, want) {
			continue
		}
		path := fmt.Sprintf("/webhooks/%d", i)
		ops = append(ops, testOp{"test", path + "/name", config.Webhooks[i].Name},
			testOp{"test", path + "/clientConfig/service/namespace", u.service.namespace}, testOp{"test", path + "/clientConfig/service/name", u.service.name},
			add(path+"/clientConfig/caBundle", encodeCerts(want...)))
	}
	data, err := json.Marshal(ops)
	if err != nil {
		return fmt.Errorf("encoding the authorities: %w", err)
	}
	_, err = u.s.deps.Client.AdmissionregistrationV1().MutatingWebhookConfigurations().Patch(ctx, config.Name, types.JSONPatchType, data, metav1.PatchOptions{})
	switch {
	case kube.IsPatchTestFailed(err), apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return nil // it has changed meanwhile: the next step reads it again
	case err != nil:
		return fmt.Errorf("writing the authority into MutatingWebhookConfiguration %q: %w", config.Name, err)
	}
	klog.FromContext(ctx).Info("Authority of the webhooks published", "mutatingWebhookConfiguration", config.Name)
	return nil
}
