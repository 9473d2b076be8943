package webhook

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestNodecontrollerScenarioWebhookOperations(t *testing.T) {
	t.Run("080_claims", func(t *testing.T) {
		f := scenario(t, nil)
		class := f.class("ours", "dc1")
		theirs := f.class("theirs", "", foreign)
		finalizers := func(pvc *corev1.PersistentVolumeClaim) string { return fmt.Sprint(pvc.Finalizers) }
		const none, ours = "[kubernetes.io/pvc-protection]", "[kubernetes.io/pvc-protection topolvm.io/pvc]"
		with := func(pvc *corev1.PersistentVolumeClaim) { pvc.Finalizers = []string{"topolvm.io/pvc", "x/y"} }
		for name, c := range map[string]struct {
			class *string
			want  string
		}{
			"ours": {&class, ours}, "theirs": {&theirs, none}, "empty": {ptr.To(""), none}, "missing": {ptr.To(f.ns + "-nothing"), none},
		} {
			if got := finalizers(f.newClaim(name, c.class, "1Gi")); got != c.want {
				t.Errorf("%s: finalizers %s, want %s", name, got, c.want)
			}
		}
		if got := finalizers(f.newClaim("has", &class, "1Gi", with)); got != "[topolvm.io/pvc x/y kubernetes.io/pvc-protection]" {
			t.Errorf("it was there already: %s", got)
		}
		withDefault.Lock()
		got := finalizers(f.newClaim("nil", nil, "1Gi"))
		withDefault.Unlock()
		if got != none {
			t.Errorf("without a class: %s", got)
		}
		// A class that the watch has not told of yet.
		late := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: f.ns + "-late"}, Provisioner: f.cfg.Driver}
		_, err := f.client.StorageV1().StorageClasses().Create(t.Context(), late, metav1.CreateOptions{})
		f.must(err)
		if got := finalizers(f.newClaim("late", &late.Name, "1Gi")); got != ours {
			t.Errorf("with a new class: %s", got)
		}
		off := setup(t, func(g *fixture) { g.cfg.Driver, g.cfg.ClaimFinalizer = f.cfg.Driver, "" })
		off.configure(nil)
		if got := finalizers(off.newClaim("off", &class, "1Gi")); got != none {
			t.Errorf("mode off: %s", got)
		}
		if n := off.metric("storage_controller_webhook_requests_total", "path", "/pvc/mutate", "result", "allowed"); n != 1 {
			t.Errorf("mode off: %v answers, want 1", n)
		}
	})
	t.Run("081_certificate_files", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(f *fixture) { f.cfg.CertDir = filepath.Join(t.TempDir(), "certs") })
		serves := func(what string, leaf *x509.Certificate) {
			t.Helper()
			f.eventually(what, func(context.Context) error {
				got, err := dial(f.s.Address(), "localhost", f.ca.cert)
				if err == nil && !got.Equal(leaf) {
					err = fmt.Errorf("serial %v is served, want %v", got.SerialNumber, leaf.SerialNumber)
				}
				return err
			})
		}
		if err := f.s.Ready(); err == nil {
			t.Error("ready without a certificate")
		}
		if _, err := dial(f.s.Address(), "localhost", f.ca.cert); err == nil {
			t.Error("it serves without a certificate")
		}
		// As the kubelet does it: a directory per version, behind a link that is exchanged.
		publish := func(version string, p pemPair) {
			t.Helper()
			dir := filepath.Join(f.cfg.CertDir, version)
			f.must(os.MkdirAll(dir, 0o700))
			f.must(os.WriteFile(filepath.Join(dir, certName), p.cert, 0o600))
			f.must(os.WriteFile(filepath.Join(dir, keyName), p.key, 0o600))
			f.must(os.Symlink(version, filepath.Join(f.cfg.CertDir, "..new")))
			f.must(os.Rename(filepath.Join(f.cfg.CertDir, "..new"), filepath.Join(f.cfg.CertDir, "..data")))
		}
		first, second := f.ca.pair(t), f.ca.pair(t)
		publish("..1", first)
		for _, name := range []string{certName, keyName} {
			f.must(os.Symlink(filepath.Join("..data", name), filepath.Join(f.cfg.CertDir, name)))
		}
		f.eventually("it is ready", func(context.Context) error { return f.s.Ready() })
		serves("the first pair is served", first.leaf)
		publish("..2", second)
		serves("the second pair is served", second.leaf)
		errorsCounted := func() float64 {
			return f.metric("storage_controller_webhook_cert_reload_total", "result", "error")
		}
		if n := errorsCounted(); n != 0 {
			t.Errorf("%v errors for two good pairs", n)
		}
		// What is bad is one error, however often it is read.
		for i, bad := range []struct {
			pair    pemPair
			problem string
		}{
			{pemPair{cert: []byte("garbage"), key: []byte("garbage")}, "PEM"},
			{pemPair{cert: first.cert, key: second.key}, "does not match"},
			{f.ca.pair(t, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }), "expired"},
		} {
			publish(fmt.Sprint("..", 3+i), bad.pair)
			f.eventually("the bad pair was seen", func(context.Context) error {
				f.s.keeper.mu.Lock()
				defer f.s.keeper.mu.Unlock()
				if p := f.s.keeper.problem; p == nil || !strings.Contains(p.Error(), bad.problem) {
					return fmt.Errorf("seen is %v", p)
				}
				return nil
			})
			seen := time.Now()
			f.eventually("it was read some more times", func(context.Context) error {
				if time.Since(seen) < 10*f.s.pace.files {
					return errors.New("not yet")
				}
				return nil
			})
			serves("the second pair is still served", second.leaf)
			f.must(f.s.Ready())
			if n := errorsCounted(); n != float64(i+1) {
				t.Errorf("%v errors for %d bad pairs", n, i+1)
			}
		}
		if left := f.metric("storage_controller_webhook_cert_expiry_seconds"); left < 3000 || left > 3600 {
			t.Errorf("%v seconds left", left)
		}
	})
	t.Run("081_certificate_files_at_the_pace_of_production", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(f *fixture) { f.cfg.CertDir, f.unhurried = filepath.Join(t.TempDir(), "certs"), true })
		const limit = 15 * time.Second
		within := func(what string, begin time.Time, check func(context.Context) error) {
			t.Helper()
			f.eventually(what, check)
			if d := time.Since(begin); d > limit {
				t.Errorf("%s after %v, want %v at most", what, d, limit)
			}
		}
		publish := func(version string) *x509.Certificate {
			t.Helper()
			p, dir := f.ca.pair(t), filepath.Join(f.cfg.CertDir, version)
			f.must(os.MkdirAll(dir, 0o700))
			f.must(os.WriteFile(filepath.Join(dir, certName), p.cert, 0o600))
			f.must(os.WriteFile(filepath.Join(dir, keyName), p.key, 0o600))
			f.must(os.Symlink(version, filepath.Join(f.cfg.CertDir, "..new")))
			f.must(os.Rename(filepath.Join(f.cfg.CertDir, "..new"), filepath.Join(f.cfg.CertDir, "..data")))
			return p.leaf
		}
		if err := f.s.Ready(); err == nil {
			t.Error("ready without a certificate")
		}
		begin := time.Now()
		publish("..1")
		for _, name := range []string{certName, keyName} {
			f.must(os.Symlink(filepath.Join("..data", name), filepath.Join(f.cfg.CertDir, name)))
		}
		within("it is ready", begin, func(context.Context) error { return f.s.Ready() })
		begin = time.Now()
		second := publish("..2")
		within("the second pair is served", begin, func(context.Context) error {
			got, err := dial(f.s.Address(), "localhost", f.ca.cert)
			if err == nil && !got.Equal(second) {
				err = errors.New("the first one is")
			}
			return err
		})
	})
	t.Run("082_self_signed", scenarioSelfSigned)
	t.Run("083_no_leader_needed", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(f *fixture) { f.cfg.CertMode, f.cfg.CertSecret, f.cfg.OwnNamespace = CertSecret, "certs", f.ns })
		if err := f.s.Ready(); err == nil {
			t.Error("ready without a certificate")
		}
		pair := f.ca.pair(t)
		secrets := f.client.CoreV1().Secrets(f.ns)
		secret, err := secrets.Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "certs"}, Type: corev1.SecretTypeTLS,
			Data: map[string][]byte{certName: pair.cert, keyName: pair.key}}, metav1.CreateOptions{})
		f.must(err)
		f.eventually("it is ready", func(context.Context) error { return f.s.Ready() })
		f.configure(nil)
		f.patched(f.create(f.claim("c", f.class("dc1", "dc1"), "1Gi")), map[string]string{"dc1": "1073741824"})
		pair = f.ca.pair(t)
		secret.Data = map[string][]byte{certName: pair.cert, keyName: pair.key}
		_, err = secrets.Update(t.Context(), secret, metav1.UpdateOptions{})
		f.must(err)
		f.eventually("the new pair is served", func(context.Context) error {
			got, err := dial(f.s.Address(), "localhost", f.ca.cert)
			if err == nil && !got.Equal(pair.leaf) {
				err = errors.New("the old one is")
			}
			return err
		})
		f.must(secrets.Delete(t.Context(), "certs", metav1.DeleteOptions{}))
		f.eventually("the deletion was seen", func(context.Context) error {
			f.s.keeper.mu.Lock()
			defer f.s.keeper.mu.Unlock()
			if f.s.keeper.problem == nil {
				return errors.New("not yet")
			}
			return nil
		})
		f.must(f.s.Ready())
	})
	t.Run("084_drains", func(t *testing.T) {
		t.Parallel()
		held, released := make(chan struct{}), make(chan struct{})
		release := sync.OnceFunc(func() { close(released) })
		defer release() // else a failure would be one of the clean-up, too
		f := setup(t, func(f *fixture) {
			f.cfg.ShutdownDelay = 300 * time.Millisecond
			f.hook = func(s *Server) {
				s.mutations["/pvc/mutate"] = mutation{"persistentvolumeclaims", func(context.Context, *request) (verdict, error) {
					close(held)
					<-released
					return verdict{}, nil
				}}
			}
		})
		f.eventually("it is ready", func(context.Context) error { return f.s.Ready() })
		answered := make(chan int, 1)
		go func() {
			code, _ := f.post("/pvc/mutate", "application/json", reviewOf(t, f.ns, "persistentvolumeclaims", map[string]any{}))
			answered <- code
		}()
		<-held
		ended := make(chan struct{})
		go func() {
			f.stop()
			close(ended)
		}()
		f.eventually("it is not ready", func(context.Context) error {
			if f.s.Ready() == nil {
				return errors.New("it is")
			}
			return nil
		})
		// Who has not heard of it yet is answered all the same.
		if code, body := f.post("/pod/mutate", "application/json", reviewOf(t, f.ns, "pods", podOf("p"))); code != 200 {
			t.Errorf("%d %s", code, body)
		}
		f.eventually("it takes no more requests", func(context.Context) error {
			if _, err := dial(f.s.Address(), "localhost", f.ca.cert); err == nil {
				return errors.New("it does")
			}
			return nil
		})
		select {
		case <-ended:
			t.Error("it ended before its last answer")
		default:
		}
		release()
		if code := <-answered; code != 200 {
			t.Errorf("%d", code)
		}
		<-ended
	})
}

// scenarioSelfSigned has two replicas, of which the API server calls the first by the name
// of a Service, as it does in a cluster.
func scenarioSelfSigned(t *testing.T) {
	t.Parallel()
	selfSigned := func(f *fixture) {
		f.cfg.CertMode, f.cfg.CertSecret, f.cfg.Service, f.cfg.ConfigName, f.cfg.OwnNamespace = CertSelfSigned, "certs", f.ns+"/hook", f.ns, f.ns
		f.cfg.ClaimFinalizer = ""
	}
	f := setup(t, selfSigned)
	second := setup(t, func(g *fixture) {
		selfSigned(g)
		g.cfg = f.cfg
	})
	port := f.s.listener.Addr().(*net.TCPAddr).Port
	_, err := f.client.CoreV1().Services(f.ns).Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "hook"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeExternalName, ExternalName: "localhost"}}, metav1.CreateOptions{})
	f.must(err)
	both := func(what string, not *x509.Certificate) (leaf *x509.Certificate) {
		t.Helper()
		f.eventually(what, func(ctx context.Context) error {
			config, err := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(ctx, f.ns, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, w := range config.Webhooks {
				for _, s := range []*Server{f.s, second.s} {
					if err := s.Ready(); err != nil {
						return err
					}
					for _, name := range f.cfg.serviceNames(objectName{f.ns, "hook"}) {
						got, err := dial(s.Address(), name, parseCerts(w.ClientConfig.CABundle)...)
						if err != nil {
							return err
						}
						if leaf == nil {
							leaf = got
						}
						if !got.Equal(leaf) || not != nil && got.Equal(not) {
							leaf = nil
							return fmt.Errorf("serial %v is served", got.SerialNumber)
						}
					}
				}
			}
			return nil
		})
		return leaf
	}
	f.lead()
	f.eventually("it is ready", func(context.Context) error { return f.s.Ready() })
	second.eventually("it is ready", func(context.Context) error { return second.s.Ready() })
	f.configure(func(config *admissionregistrationv1.MutatingWebhookConfiguration) {
		for i := range config.Webhooks {
			path := "/pod/mutate"
			if i > 0 {
				path = "/pvc/mutate"
			}
			config.Webhooks[i].ClientConfig = admissionregistrationv1.WebhookClientConfig{Service: &admissionregistrationv1.ServiceReference{
				Namespace: f.ns, Name: "hook", Path: &path, Port: ptr.To(int32(port))}}
		}
	})
	first := both("both replicas serve one pair that the configuration trusts", nil)
	class := f.class("dc1", "dc1")
	f.claim("c", class, "1Gi")
	f.patched(f.create("c"), map[string]string{"dc1": "1073741824"})

	secrets := f.client.CoreV1().Secrets(f.ns)
	old, err := secrets.Get(t.Context(), "certs", metav1.GetOptions{})
	f.must(err)
	// While all is made anew, not one pod may be refused, and no new connection either:
	// what the configuration says at a time has to fit what both replicas serve just then.
	admitting, stop := context.WithCancel(t.Context())
	refused := make(chan error, 1)
	go func() {
		defer close(refused)
		for admitting.Err() == nil {
			if err := f.admitted(admitting, second.s); err != nil && admitting.Err() == nil {
				refused <- err
				return
			}
		}
	}()
	begin := time.Now()
	f.must(secrets.Delete(t.Context(), "certs", metav1.DeleteOptions{}))
	both("both replicas serve a new pair", first)
	if d := time.Since(begin); d > 10*time.Second {
		t.Errorf("all is made anew after %v, want 10s at most", d)
	}
	renewed, err := secrets.Get(t.Context(), "certs", metav1.GetOptions{})
	f.must(err)
	if renewed.UID == old.UID || string(renewed.Data[caName]) == string(old.Data[caName]) {
		t.Error("the Secret is the old one")
	}
	stop()
	if err := <-refused; err != nil {
		t.Errorf("a pod was refused meanwhile: %v", err)
	}
	f.patched(f.create("c"), map[string]string{"dc1": "1073741824"})

	// What somebody takes out of the configuration comes back.
	f.eventually("the configuration is emptied", func(ctx context.Context) error {
		config, err := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(ctx, f.ns, metav1.GetOptions{})
		f.must(err)
		for i := range config.Webhooks {
			config.Webhooks[i].ClientConfig.CABundle = nil
		}
		_, err = f.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Update(ctx, config, metav1.UpdateOptions{})
		return err
	})
	both("the configuration trusts the pair again", nil)
}

// admitted is nil when a pod is let through, and when a new connection to each replica
// would be trusted.
func (f *fixture) admitted(ctx context.Context, second *Server) error {
	config, err := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(ctx, f.ns, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, s := range []*Server{f.s, second} {
		if _, err := dial(s.Address(), "hook."+f.ns+".svc", parseCerts(config.Webhooks[0].ClientConfig.CABundle)...); err != nil {
			return err
		}
	}
	_, err = f.client.CoreV1().Pods(f.ns).Create(ctx, podOf("probe-", claimVolume("v", "c")), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	return err
}
