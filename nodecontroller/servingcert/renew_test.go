// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package servingcert

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// aged is the lifetime of a pair of which less than a third is left.
const aged = 80 * time.Minute

// exits returns a configuration under which the nth write of the Secret gets no response, and nothing after it
// arrives: the process has exited. Whether the write arrives is stored.
func exits(t *testing.T, cfg *rest.Config, nth int32, stored bool) *rest.Config {
	var writes atomic.Int32
	return kubetest.Proxy(t, cfg, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		exiting := isSecretWrite(r) && writes.Add(1) == nth
		if exiting && stored {
			pass.ServeHTTP(discard{w}, r)
		}
		if exiting || writes.Load() >= nth {
			http.Error(w, "the process has exited", http.StatusServiceUnavailable)
			return
		}
		pass.ServeHTTP(w, r)
	})
}

// discard drops a response.
type discard struct{ http.ResponseWriter }

func (discard) Header() http.Header         { return http.Header{} }
func (discard) Write(p []byte) (int, error) { return len(p), nil }
func (discard) WriteHeader(int)             {}

// TestExit renews an aged pair by leaders that exit before or after each write of the Secret. At no time
// may a replica serve, or load, a pair that API servers do not trust.
func TestExit(t *testing.T) {
	for name, c := range map[string]struct {
		nth    int32
		stored bool
	}{
		"before the new pair is stored":  {1, false},
		"after the new pair was stored":  {1, true},
		"before the new pair is loaded":  {2, false},
		"after the new pair is loadable": {2, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var old *pair
			f := setup(t, func(f *fixture) {
				old = f.pair(aged)
				f.createSecret(old)
			})
			f.configure(admissionregistrationv1.WebhookClientConfig{Service: f.service(), CABundle: old.ca})
			f.serves("the aged pair is served", old)
			for range 3 {
				leader := f.manager(exits(t, f.cp.Config(), c.nth, c.stored))
				for range 3 { // rounds
					_ = leader.renew(t.Context()) // fails when it exits
					f.must(f.trusts(old))
					f.must(f.trusts(f.stored()))
				}
			}
			f.lead()
			renewed := f.published("the next leader renews it", old)
			f.must(f.trusts(old)) // for replicas that still serve it
			if again := f.stored(); !again.Leaf.Equal(renewed.Leaf) {
				t.Error("it was renewed twice")
			}
			if certs, err := cert.ParseCertsPEM(f.bundles()[0]); err != nil || len(certs) != 2 {
				t.Errorf("%d authorities are published, %v", len(certs), err)
			}
		})
	}
}

// succeeded counts successful responses.
type succeeded struct {
	http.ResponseWriter
	count *atomic.Int32
}

func (w succeeded) WriteHeader(code int) {
	if code < 300 {
		w.count.Add(1)
	}
	w.ResponseWriter.WriteHeader(code)
}

// TestTwoLeaders lets two leaders renew at the same time: both generate a pair before either is stored. The loser
// adopts the pair of the winner.
func TestTwoLeaders(t *testing.T) {
	t.Parallel()
	for name, lifetime := range map[string]time.Duration{"no Secret": 0, "an aged pair": aged} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var arrived, written atomic.Int32
			both := make(chan struct{})
			meet := func(f *fixture) {
				f.api = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
					if isSecretWrite(r) {
						if arrived.Add(1) == 2 {
							close(both)
						}
						select {
						case <-both:
						case <-r.Context().Done():
						}
						w = succeeded{w, &written}
					}
					pass.ServeHTTP(w, r)
				})
			}
			var bundle []byte
			var old *pair
			f := setup(t, func(f *fixture) {
				meet(f)
				if lifetime > 0 {
					old = f.pair(lifetime)
					f.createSecret(old)
				}
			})
			second := setup(t, func(g *fixture) { g.cfg, g.ns = f.cfg, f.ns; meet(g) })
			if lifetime > 0 {
				bundle = old.ca
				f.serves("the aged pair is served", old)
				second.serves("by both", old)
				defer func() { f.must(f.trusts(old)) }()
			}
			f.configure(admissionregistrationv1.WebhookClientConfig{Service: f.service(), CABundle: bundle})
			f.lead()
			second.lead()
			p := f.published("the new pair is served and trusted", old)
			second.serves("the loser serves it, too", p)
			if n := written.Load(); n != 2 || arrived.Load() < 3 {
				t.Errorf("%d of %d writes of the Secret succeeded, want one to store the pair and one to load it", n, arrived.Load())
			}
		})
	}
}

// TestPublish adds authorities. Webhooks of other programs in the configuration stay as they are.
func TestPublish(t *testing.T) {
	t.Parallel()
	f := setup(t, nil)
	first, second, third := f.pair(0), f.pair(0), f.pair(0)
	expired := f.pair(time.Minute)
	theirs := first.ca
	f.configure(
		admissionregistrationv1.WebhookClientConfig{Service: &admissionregistrationv1.ServiceReference{Namespace: "x", Name: "hook"},
			CABundle: theirs},
		admissionregistrationv1.WebhookClientConfig{Service: f.service()},
		admissionregistrationv1.WebhookClientConfig{Service: &admissionregistrationv1.ServiceReference{Namespace: f.ns, Name: "x"},
			CABundle: theirs},
		admissionregistrationv1.WebhookClientConfig{URL: ptr.To("https://localhost/pod/mutate"), CABundle: theirs},
	)
	for _, c := range []struct {
		what     string
		required []*pair
		trusted  bool
		want     []*pair
	}{
		{"the first one", []*pair{expired}, true, []*pair{expired}},
		{"another one; the expired one is removed", []*pair{first}, false, []*pair{first}},
		{"beside it", []*pair{second, first}, false, []*pair{second, first}},
		{"nothing to do, in another order", []*pair{first, second}, true, []*pair{second, first}},
		{"those of another leader stay", []*pair{third}, false, []*pair{third, second, first}},
	} {
		var required []*tls.Certificate
		for _, p := range c.required {
			required = append(required, p.Certificate)
		}
		trusted, err := f.m.publish(t.Context(), required...)
		var want []byte
		for _, p := range c.want {
			want = append(want, p.ca...)
		}
		if b := f.bundles(); err != nil || trusted != c.trusted || string(b[1]) != string(want) {
			t.Errorf("%s: %t, %v, bundle %s", c.what, trusted, err, b[1])
		}
	}
	if b := f.bundles(); string(b[0]) != string(theirs) || string(b[2]) != string(theirs) || string(b[3]) != string(theirs) {
		t.Errorf("the webhooks of other programs were written: %q", b)
	}
	var many []byte
	for range maxBundle + 2 {
		many = append(many, f.pair(0).ca...)
	}
	bundle, _, err := bundleWith(many, time.Now(), first.Certificate)
	if n := strings.Count(string(bundle), "BEGIN"); err != nil || n != maxBundle || !strings.HasPrefix(string(bundle), string(first.ca)) {
		t.Errorf("%d authorities, %v", n, err)
	}
}

// TestFresh checks when a pair is renewed.
func TestFresh(t *testing.T) {
	p, other := newPair(t, 3*time.Hour, "hook", "hook.ns"), newPair(t, 3*time.Hour, "hook", "hook.ns")
	leaf := strings.TrimSuffix(string(p.cert), string(p.ca))
	for name, c := range map[string]struct {
		p    *tls.Certificate
		at   time.Duration // since the pair became valid
		host string
		want bool
	}{
		"new":                      {p.Certificate, time.Hour, "hook", true},
		"two thirds":               {p.Certificate, 2 * time.Hour, "hook", true},
		"less than a third left":   {p.Certificate, 2*time.Hour + time.Second, "hook", false},
		"expired":                  {p.Certificate, 4 * time.Hour, "hook", false},
		"not valid yet":            {p.Certificate, -time.Second, "hook", false},
		"another host":             {p.Certificate, time.Hour, "hook.other", false},
		"no Secret":                {parsePair(nil, nil), time.Hour, "hook", false},
		"the key of another pair":  {parsePair(p.cert, other.key), time.Hour, "hook", false},
		"the authority of another": {parsePair([]byte(leaf+string(other.ca)), p.key), time.Hour, "hook", false},
		"no authority":             {parsePair([]byte(leaf), p.key), time.Hour, "hook", false},
		"the authority as a pair":  {parsePair(p.ca, p.key), time.Hour, "hook", false},
	} {
		if got := fresh(c.p, []string{c.host}, p.Leaf.NotBefore.Add(c.at)); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
	if strings.Contains(string(p.cert), "PRIVATE KEY") || strings.Count(string(p.key), "PRIVATE KEY") != 2 {
		t.Error("there is more than one key")
	}
}

// TestForeign has a Secret and a configuration of other programs, which stay as they are.
func TestForeign(t *testing.T) {
	t.Parallel()
	var secret *corev1.Secret
	f := setup(t, func(f *fixture) {
		var err error
		secret, err = f.client.CoreV1().Secrets(f.ns).Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: "certs", Labels: map[string]string{"a": "b"}},
			Data:       map[string][]byte{"password": []byte("x")},
		}, metav1.CreateOptions{})
		f.must(err)
	})
	theirs := f.pair(0).ca
	f.configure(admissionregistrationv1.WebhookClientConfig{
		Service: &admissionregistrationv1.ServiceReference{Namespace: "x", Name: "hook"}, CABundle: theirs,
	})
	f.lead()
	f.counts("upkeep_total", "error", 2)
	if now := f.secret(); now.ResourceVersion != secret.ResourceVersion {
		t.Errorf("the Secret was written: %v", now)
	}
	if err := f.m.Ready(); err == nil {
		t.Error("ready without a certificate")
	}
	// Once its data is removed, the Secret is used. The missing webhook stays an error.
	secret.Data = nil
	_, err := f.client.CoreV1().Secrets(f.ns).Update(t.Context(), secret, metav1.UpdateOptions{})
	f.must(err)
	f.ready()
	f.counts("upkeep_total", "error", f.metric("upkeep_total", "error")+1)
	if now := f.secret(); now.Labels["a"] != "b" || now.Annotations[annService] != f.ns+"/hook" {
		t.Errorf("%v", now.ObjectMeta)
	}
	if string(f.bundles()[0]) != string(theirs) {
		t.Error("the webhook of another program was written")
	}
}

// TestTwoServices has two drivers with one Secret: each replaces the certificate of the other at most once, and serves its own.
func TestTwoServices(t *testing.T) {
	t.Parallel()
	f := setup(t, nil)
	f.configure()
	f.ready()
	f.cfg.Service = "other"
	other := f.manager(nil)
	f.background(other.Run)
	f.eventually("the other is ready", func(context.Context) error { return other.Ready() })
	second := f.stored()
	if err := f.m.renew(t.Context()); err == nil || !strings.Contains(err.Error(), f.ns+"/other") {
		t.Errorf("the first: %v", err)
	}
	f.counts("reload_total", "ok", 1) // of the other
	if now := f.stored(); !now.Leaf.Equal(second.Leaf) {
		t.Error("the certificate was replaced again")
	}
	if cert, err := f.m.GetCertificate(nil); err != nil || cert.Leaf.VerifyHostname("hook."+f.ns+".svc") != nil {
		t.Errorf("the first serves the certificate of the other: %v", err)
	}
}

// TestUnpublishedPair deletes the Secret while a replica serves: a new one stores its pair only after it has published it.
func TestUnpublishedPair(t *testing.T) {
	t.Parallel()
	f := setup(t, nil)
	f.configure()
	f.ready()
	f.must(f.client.CoreV1().Secrets(f.ns).Delete(t.Context(), "certs", metav1.DeleteOptions{}))
	var fails atomic.Bool
	fails.Store(true)
	late := f.manager(kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if fails.Load() && r.Method == http.MethodPatch {
			http.Error(w, "try later", http.StatusServiceUnavailable)
			return
		}
		pass.ServeHTTP(w, r)
	}))
	f.must(late.renew(t.Context()))
	if err := late.renew(t.Context()); err == nil || f.stored() != nil {
		t.Errorf("the API server is away: %v", err)
	}
	fails.Store(false)
	f.must(late.renew(t.Context()))
	if f.stored() != nil {
		t.Error("API servers have had no time to trust it")
	}
	f.must(late.renew(t.Context()))
	f.published("it is stored", nil)
}

// TestRemovedAuthority has another program that sets caBundle: a new replica serves nevertheless, and reports it.
func TestRemovedAuthority(t *testing.T) {
	t.Parallel()
	f := setup(t, func(f *fixture) {
		theirs := f.pair(0).ca
		f.configure(admissionregistrationv1.WebhookClientConfig{Service: f.service(), CABundle: theirs})
		patch, err := json.Marshal([]map[string]any{{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": theirs}})
		f.must(err)
		f.api = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			pass.ServeHTTP(w, r)
			if r.Method == http.MethodPatch {
				configs := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
				if _, err := configs.Patch(t.Context(), f.ns, types.JSONPatchType, patch, metav1.PatchOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
	})
	f.ready()
	if n := f.metric("upkeep_total", "error"); n == 0 {
		t.Error("no error is counted")
	}
}

// TestForbiddenConfiguration: without a pair the leader stores one although it cannot publish it; it does not
// replace one that is trusted.
func TestForbiddenConfiguration(t *testing.T) {
	t.Parallel()
	var forbidden atomic.Bool
	forbidden.Store(true)
	f := setup(t, func(f *fixture) {
		f.api = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if forbidden.Load() && strings.Contains(r.URL.Path, "/mutatingwebhookconfigurations/") {
				http.Error(w, "no", http.StatusForbidden)
				return
			}
			pass.ServeHTTP(w, r)
		})
	})
	f.configure()
	stop := f.lead()
	f.ready()
	f.counts("upkeep_total", "error", 1)
	if f.bundles()[0] != nil {
		t.Error("it was published")
	}
	stop()
	old := f.pair(aged)
	secret := f.secret()
	secret.Data = map[string][]byte{certName: old.cert, keyName: old.key}
	_, err := f.client.CoreV1().Secrets(f.ns).Update(t.Context(), secret, metav1.UpdateOptions{})
	f.must(err)
	f.must(f.m.renew(t.Context()))
	if err := f.m.renew(t.Context()); err == nil || !f.stored().Leaf.Equal(old.Leaf) {
		t.Errorf("it replaced a pair without publishing the authority: %v", err)
	}
	forbidden.Store(false)
	f.lead()
	f.published("it is renewed", old)
}

// TestShippedPermissions: the leader needs no more permissions than deploy/rbac grants.
func TestShippedPermissions(t *testing.T) {
	t.Parallel()
	f := setup(t, func(f *fixture) {
		f.api = f.cp.UserConfig(f, "system:serviceaccount:"+f.ns+":storage-controller-nodecontroller")
		f.grant("../../deploy/rbac/nodecontroller-webhook-certificates/rbac.yaml")
	})
	f.configure()
	stop := f.lead()
	first := f.published("the stored pair is served and published", nil)
	f.must(f.client.CoreV1().Secrets(f.ns).Delete(t.Context(), "certs", metav1.DeleteOptions{}))
	f.published("it is recreated", first)
	stop()
	if n := f.metric("upkeep_total", "error"); n != 0 {
		t.Errorf("%v errors", n)
	}
}

// grant creates the permissions in the file at path, for the names of the test.
func (f *fixture) grant(path string) {
	f.Helper()
	text, err := os.ReadFile(path)
	f.must(err)
	names := strings.NewReplacer(`["storage-controller-webhook-certificates"]`, `["certs"]`, `["storage-controller-webhooks"]`, `["`+f.ns+
		`"]`,
		"namespace: default", "namespace: "+f.ns, "storage-controller:", f.ns+":")
	rbac := f.client.RbacV1()
	for _, doc := range strings.Split(names.Replace(string(text)), "\n---\n") {
		var kind metav1.TypeMeta
		f.must(yaml.Unmarshal([]byte(doc), &kind))
		parse := func(obj any) { f.must(yaml.UnmarshalStrict([]byte(doc), obj)) }
		switch kind.Kind {
		case "Role":
			obj := &rbacv1.Role{}
			parse(obj)
			_, err = rbac.Roles(f.ns).Create(f.Context(), obj, metav1.CreateOptions{})
		case "RoleBinding":
			obj := &rbacv1.RoleBinding{}
			parse(obj)
			_, err = rbac.RoleBindings(f.ns).Create(f.Context(), obj, metav1.CreateOptions{})
		case "ClusterRole":
			obj := &rbacv1.ClusterRole{}
			parse(obj)
			_, err = rbac.ClusterRoles().Create(f.Context(), obj, metav1.CreateOptions{})
		case "ClusterRoleBinding":
			obj := &rbacv1.ClusterRoleBinding{}
			parse(obj)
			_, err = rbac.ClusterRoleBindings().Create(f.Context(), obj, metav1.CreateOptions{})
		default:
			f.Fatalf("%s holds a %q", path, kind.Kind)
		}
		f.must(err)
	}
}

// TestClock loads pairs under a clock that moves.
func TestClock(t *testing.T) {
	const day = 24 * time.Hour
	m, err := New(Config{Mode: Files}, nil, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	p, warnings := newPair(t, 10*day, "hook"), 0
	ctx := klog.NewContext(t.Context(), funcr.New(func(_, args string) {
		warnings += strings.Count(args, "expires in less than 7 days")
	}, funcr.Options{}))
	for _, c := range []struct {
		at       time.Duration
		problem  string
		warnings int
	}{
		{-time.Minute, "not valid before", 0}, {-time.Second, "not valid before", 0}, {time.Minute, "", 0}, {3 * day, "", 0},
		{3*day + time.Minute, "", 1}, {4 * day, "", 1}, {11 * day, "expired", 1},
	} {
		m.now = func() time.Time { return p.Leaf.NotBefore.Add(c.at) }
		m.load(ctx, p.cert, p.key, nil)
		err := m.Ready()
		if c.problem == "" && err != nil || c.problem != "" && (err == nil || !strings.Contains(err.Error(), c.problem)) {
			t.Errorf("at %v: %v", c.at, err)
		}
		if warnings != c.warnings {
			t.Errorf("at %v: %d warnings, want %d", c.at, warnings, c.warnings)
		}
	}
	if m.remaining() >= 0 {
		t.Errorf("%v left", m.remaining())
	}
	if pair, err := m.GetCertificate(nil); err != nil || pair == nil {
		t.Errorf("an expired pair is not served: %v", err)
	}
}

func TestNew(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  Config
		want string // in the error, or the Secret
	}{
		"name":                {Config{Mode: Secret, Secret: "a", Namespace: "own"}, "own/a"},
		"unknown namespace":   {Config{Mode: Secret, Secret: "a"}, "--webhook-cert-secret"},
		"no Secret":           {Config{Mode: Secret, Namespace: "own"}, "--webhook-cert-secret"},
		"no Service":          {Config{Mode: SelfSigned, Secret: "a", Namespace: "own"}, "--webhook-service"},
		"files need no names": {Config{Mode: Files}, "/"},
	} {
		reg := prometheus.NewRegistry()
		m, err := New(c.cfg, nil, reg)
		if err == nil && m.secret.String() != c.want || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v", name, m, err)
		}
		families, err := reg.Gather()
		if problems, lint := promlint.NewWithMetricFamilies(families).Lint(); err != nil || lint != nil || len(problems) > 0 || m != nil &&
			len(families) != 4 {
			t.Errorf("%v %v %v", err, lint, problems)
		}
	}
}

// TestConcurrentPublish lets another leader publish between the read and the patch of one: neither authority
// may be lost.
func TestConcurrentPublish(t *testing.T) {
	t.Parallel()
	f := setup(t, nil)
	old, mine, theirs := f.pair(0), f.pair(0), f.pair(0)
	f.configure(admissionregistrationv1.WebhookClientConfig{Service: f.service(), CABundle: old.ca})
	var once sync.Once
	m := f.manager(kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method == http.MethodPatch {
			once.Do(func() {
				if _, err := f.m.publish(r.Context(), theirs.Certificate); err != nil {
					t.Error(err)
				}
			})
		}
		pass.ServeHTTP(w, r)
	}))
	for round, want := range []bool{false, false, true} {
		if trusted, err := m.publish(t.Context(), mine.Certificate); err != nil || trusted != want {
			t.Errorf("round %d: %t, %v", round, trusted, err)
		}
	}
	for _, p := range []*pair{old, mine, theirs} {
		f.must(f.trusts(p))
	}
}
