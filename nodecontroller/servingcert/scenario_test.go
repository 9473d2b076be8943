// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package servingcert

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestNodecontrollerScenarioCertificates(t *testing.T) {
	t.Run("081_certificate_files", scenarioFiles)
	t.Run("081_certificate_files_at_the_pace_of_production", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(f *fixture) {
			f.cfg.Mode = Files
			f.hook = func(m *Manager) { m.poll = 5 * time.Second }
		})
		first, second := f.pair(0), f.pair(0)
		f.publishFiles("..1", first.cert, first.key)
		f.ready()
		f.publishFiles("..2", second.cert, second.key)
		f.serves("the second pair is served", second)
	})
	t.Run("082_self_signed", scenarioSelfSigned)
	t.Run("083_no_leader_needed_to_generate", func(t *testing.T) {
		t.Parallel()
		setup(t, nil).ready() // the leader may be a process without webhooks
	})
	t.Run("083_no_leader_needed", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(f *fixture) { f.cfg.Mode = Secret })
		if err := f.m.Ready(); err == nil {
			t.Error("ready without a certificate")
		}
		first, second := f.pair(0), f.pair(0)
		f.createSecret(first)
		f.ready()
		f.configure(admissionregistrationv1.WebhookClientConfig{Service: f.reachable(),
			CABundle: append(first.ca, second.ca...)})
		f.eventually("the API server calls it", f.admitted)
		secret := f.secret()
		secret.Data[certName], secret.Data[keyName] = second.cert, second.key
		_, err := f.client.CoreV1().Secrets(f.ns).Update(t.Context(), secret, metav1.UpdateOptions{})
		f.must(err)
		f.serves("the new pair is served", second)
		f.must(f.client.CoreV1().Secrets(f.ns).Delete(t.Context(), "certs", metav1.DeleteOptions{}))
		f.eventually("the deletion was observed", func(context.Context) error { return f.problem("not found") })
		f.must(f.m.Ready())
	})
}

// problem returns an error unless the reason why the newest pair is not served contains text.
func (f *fixture) problem(text string) error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if p := f.m.problem; p == nil || !strings.Contains(p.Error(), text) {
		return fmt.Errorf("the problem is %v", p)
	}
	return nil
}

func scenarioFiles(t *testing.T) {
	t.Parallel()
	f := setup(t, func(f *fixture) { f.cfg.Mode, f.cfg.Dir = Files, f.cfg.Dir+"/missing" })
	if err := f.m.Ready(); err == nil {
		t.Error("ready without a certificate")
	}
	first, second := f.pair(0), f.pair(0)
	if _, err := f.dial("hook", first.ca); err == nil {
		t.Error("it serves without a certificate")
	}
	f.publishFiles("..1", first.cert, first.key)
	f.ready()
	f.serves("the first pair is served", first)
	f.publishFiles("..2", second.cert, second.key)
	f.serves("the second pair is served", second)
	if n := f.metric("reload_total", "error") + f.metric("rejected", ""); n != 0 {
		t.Errorf("%v errors for two good pairs", n)
	}
	// A bad pair is one error, however often it is read.
	expired := f.pair(time.Minute) // an hour ago
	for i, bad := range []struct {
		cert, key []byte
		problem   string
	}{
		{[]byte("garbage"), []byte("garbage"), "PEM"},
		{first.cert, second.key, "does not match"},
		{expired.cert, expired.key, "expired"},
	} {
		f.publishFiles(fmt.Sprint("..", 3+i), bad.cert, bad.key)
		f.eventually("the bad pair was read", func(context.Context) error { return f.problem(bad.problem) })
		read := time.Now()
		f.eventually("it was read some more times", func(context.Context) error {
			if time.Since(read) < 10*f.m.poll {
				return errors.New("not yet")
			}
			return nil
		})
		f.serves("the second pair is still served", second)
		f.must(f.m.Ready())
		if n := f.metric("reload_total", "error"); n != float64(i+1) {
			t.Errorf("%v errors for %d bad pairs", n, i+1)
		}
		if f.metric("rejected", "") != 1 {
			t.Error("the metric does not show that the pair is rejected")
		}
	}
	if left := f.metric("expiry_seconds", ""); left < 364*24*3600 || left > 365*24*3600 {
		t.Errorf("%v seconds left", left)
	}
}

// scenarioSelfSigned has two replicas. The API server calls the first under the name of a Service.
func scenarioSelfSigned(t *testing.T) {
	t.Parallel()
	f := setup(t, nil)
	second := setup(t, func(g *fixture) { g.cfg, g.ns = f.cfg, f.ns })
	f.lead()
	f.ready()
	f.configure(admissionregistrationv1.WebhookClientConfig{Service: f.reachable()})
	first := f.published("the first replica serves a trusted pair", nil)
	second.serves("the second one, too", first)
	f.eventually("the API server calls it", f.admitted)
	f.must(f.admitted(t.Context()))

	// While the Secret is recreated, no pod may be rejected, and no new connection.
	admitting, stop := context.WithCancel(t.Context())
	rejected := make(chan error, 1)
	go func() {
		defer close(rejected)
		for admitting.Err() == nil {
			if err := f.connects(admitting, second); err != nil && admitting.Err() == nil {
				rejected <- err
				return
			}
		}
	}()
	old := f.secret()
	f.must(f.client.CoreV1().Secrets(f.ns).Delete(t.Context(), "certs", metav1.DeleteOptions{}))
	renewed := f.published("the first replica serves a new pair", first)
	second.serves("the second one, too", renewed)
	if f.secret().UID == old.UID {
		t.Error("the Secret is the old one")
	}
	stop()
	if err := <-rejected; err != nil {
		t.Errorf("rejected meanwhile: %v", err)
	}
	f.must(f.admitted(t.Context()))

	// The authority is published again after another program removed it.
	f.eventually("the configuration is emptied", func(ctx context.Context) error {
		configs := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
		config, err := configs.Get(ctx, f.ns, metav1.GetOptions{})
		f.must(err)
		config.Webhooks[0].ClientConfig.CABundle = nil
		_, err = configs.Update(ctx, config, metav1.UpdateOptions{})
		return err
	})
	f.eventually("the configuration trusts the pair again", func(context.Context) error { return f.trusts(renewed) })
}

// connects returns an error unless API servers trust a new connection to both replicas, and a pod is admitted.
func (f *fixture) connects(ctx context.Context, second *fixture) error {
	config, err := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(ctx, f.ns, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, replica := range []*fixture{f, second} {
		if _, err := replica.dial("hook."+f.ns+".svc", config.Webhooks[0].ClientConfig.CABundle); err != nil {
			return err
		}
	}
	return f.admitted(ctx)
}
