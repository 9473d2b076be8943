// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// TestNamePrefixOfWebhooks: with a namePrefix, which an installation beside another driver
// has, the environment and the permissions name what the objects are called then.
func TestNamePrefixOfWebhooks(t *testing.T) {
	t.Parallel()
	for _, overlay := range []string{"all-in-one", "configuration-file"} {
		objects := installed(t, "namespace: other\nnamePrefix: second-\nnameSuffix: -x", overlay, "components/webhooks-enforce")
		settings := map[string]string{}
		for _, c := range podOf(t, objects).Containers {
			for _, v := range c.Env {
				settings[v.Name] = v.Value
			}
		}
		config, service, secret := settings["STORAGE_CONTROLLER_WEBHOOK_CONFIG_NAME"], settings["STORAGE_CONTROLLER_WEBHOOK_SERVICE"],
			settings["STORAGE_CONTROLLER_WEBHOOK_CERT_SECRET"]
		if config != "second-storage-controller-webhooks-x" || service != "second-storage-controller-webhook-x" ||
			secret != "second-storage-controller-webhook-certificates-x" {
			t.Errorf("%s: the environment is %q", overlay, settings)
		}
		found := map[string]bool{}
		for _, o := range objects {
			switch o.GetKind() {
			case "Service":
				found["service"] = o.GetName() == service
			case "MutatingWebhookConfiguration":
				c := converted[admissionv1.MutatingWebhookConfiguration](t, o)
				found["configuration"] = c.Name == config
				for _, w := range c.Webhooks {
					if s := w.ClientConfig.Service; s.Name != service || s.Namespace != "other" {
						t.Errorf("%s: %s calls %s/%s", overlay, w.Name, s.Namespace, s.Name)
					}
				}
			case "Role", "ClusterRole":
				for _, r := range converted[rbacv1.ClusterRole](t, o).Rules { // which has the fields of a Role as well
					for _, name := range r.ResourceNames {
						found[r.Resources[0]+" "+name] = true
					}
				}
			}
		}
		for _, what := range []string{"service", "configuration", "mutatingwebhookconfigurations " + config, "secrets " + secret} {
			if !found[what] {
				t.Errorf("%s: no %s among %v", overlay, what, found)
			}
		}
	}
}

// TestWebhooksOfTwoDrivers installs the overlay for two drivers, and has the container of each
// run: the API server trusts both at their own Service.
func TestWebhooksOfTwoDrivers(t *testing.T) {
	t.Parallel()
	for range 2 {
		e := newEnv(t, csitest.Config{}, 1)
		objects := installed(t, "namespace: "+e.ns+"\nnamePrefix: "+e.ns+"-", "all-in-one", "components/webhooks")
		granted := e.applyRendered(objects)
		account := e.ns + "-csi-controller"
		e.inForce(account, granted)
		kubeconfig, _, refused := e.as(account)
		config := e.configured(objects)
		p := e.contained(podOf(t, objects).Containers[0], kubeconfig, account+"-x", "--controllers=nodecontroller",
			"--webhook-addr=127.0.0.1:0")
		e.eventually("what it serves is trusted at its Service", func(ctx context.Context) error {
			c, err := e.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(ctx, config, metav1.GetOptions{})
			if err != nil {
				return err
			}
			return p.trustedBy(c.Webhooks[0].ClientConfig)
		})
		if no := refused(); len(no) > 0 {
			t.Errorf("refused: %v", no)
		}
	}
}

// configured makes the configuration of webhooks among objects, for no namespace but that of
// e, and is its name.
func (e *env) configured(objects []*unstructured.Unstructured) string {
	e.t.Helper()
	configurations := e.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	for _, o := range objects {
		if o.GetKind() != "MutatingWebhookConfiguration" {
			continue
		}
		c := converted[admissionv1.MutatingWebhookConfiguration](e.t, o)
		for i := range c.Webhooks {
			c.Webhooks[i].NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: e.ns}}
		}
		_, err := configurations.Create(e.t.Context(), c, metav1.CreateOptions{})
		e.must(err)
		e.t.Cleanup(func() { _ = configurations.Delete(context.Background(), c.Name, metav1.DeleteOptions{}) })
		return c.Name
	}
	e.t.Fatal("there is no configuration of webhooks")
	return ""
}

// trustedBy is nil when the API server would trust what p serves to client.
func (p *process) trustedBy(client admissionv1.WebhookClientConfig) error {
	address := admits.FindStringSubmatch(p.logged())
	if address == nil {
		return errors.New("it does not say where it admits")
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(client.CABundle) {
		return errors.New("there is no authority")
	}
	name := fmt.Sprintf("%s.%s.svc", client.Service.Name, client.Service.Namespace)
	conn, err := tls.Dial("tcp", address[1], &tls.Config{RootCAs: roots, ServerName: name})
	if err != nil {
		return err
	}
	return conn.Close()
}
