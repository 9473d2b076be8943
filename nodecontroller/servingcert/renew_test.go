package servingcert

import (
	"context"
	"crypto/x509"
	"errors"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// aged is the lifetime of a pair of which less than a third is left.
const aged = 80 * time.Minute

// exits returns a configuration under which the first write of the Secret never arrives, and neither does
// anything after it: the process has exited.
func exits(t *testing.T, cfg *rest.Config, stored bool) *rest.Config {
	var exited atomic.Bool
	return kubetest.Proxy(t, cfg, func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if isSecretWrite(r) && !exited.Load() {
			if stored {
				pass.ServeHTTP(discard{w}, r)
			}
			exited.Store(true)
		}
		if exited.Load() {
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

// TestExit renews an aged pair by leaders that exit before or after they store the new one. At no time
// may a replica serve, or load, a pair that API servers do not trust.
func TestExit(t *testing.T) {
	for name, stored := range map[string]bool{"after publish": false, "after store": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, nil)
			old := f.pair(aged)
			f.createSecret(old)
			f.configure(admissionregistrationv1.WebhookClientConfig{Service: f.service(), CABundle: encodeCerts(old.authority)})
			f.serves("the aged pair is served", old)
			for range 3 {
				leader := f.manager(exits(t, f.cp.Config(), stored))
				leader.pace.settle = 10 * time.Millisecond
				if err := leader.renew(t.Context()); err == nil && !stored {
					t.Fatal("it stored a pair")
				}
				f.must(f.trusts(old))
				f.must(f.trusts(f.stored()))
			}
			if n := len(parseCerts(f.bundles()[0])); !stored && n != 4 || stored && n != 2 {
				t.Errorf("%d authorities are published", n)
			}
			f.lead()
			renewed := f.published("the next leader renews it", old)
			f.must(f.trusts(old)) // for replicas that still serve it
			if again := f.stored(); !again.served.Leaf.Equal(renewed.served.Leaf) {
				t.Error("it was renewed twice")
			}
		})
	}
}

// TestTwoLeaders lets two leaders renew at the same time: both publish before either stores. The loser adopts
// the pair of the winner.
func TestTwoLeaders(t *testing.T) {
	t.Parallel()
	for name, lifetime := range map[string]time.Duration{"no Secret": 0, "an aged pair": aged} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var arrived atomic.Int32
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
					}
					pass.ServeHTTP(w, r)
				})
			}
			f := setup(t, meet)
			second := setup(t, func(g *fixture) { g.cfg, g.ns = f.cfg, f.ns; meet(g) })
			bundle := []byte(nil)
			if lifetime > 0 {
				old := f.pair(lifetime)
				f.createSecret(old)
				bundle = encodeCerts(old.authority)
				f.serves("the aged pair is served", old)
				second.serves("by both", old)
				defer func() { f.must(f.trusts(old)) }()
			}
			f.configure(admissionregistrationv1.WebhookClientConfig{Service: f.service(), CABundle: bundle})
			f.lead()
			second.lead()
			f.eventually("one pair is stored", func(context.Context) error {
				if arrived.Load() < 2 {
					return errors.New("not yet")
				}
				return nil
			})
			p := f.published("it is served and trusted", nil)
			second.serves("the loser serves it, too", p)
			if n := arrived.Load(); n != 2 {
				t.Errorf("%d writes of the Secret, want 2", n)
			}
		})
	}
}

// TestPublish adds and removes authorities. Webhooks of other programs in the configuration stay as they are.
func TestPublish(t *testing.T) {
	t.Parallel()
	f := setup(t, nil)
	first, second, third := f.pair(0), f.pair(0), f.pair(0)
	expired := f.pair(time.Minute)
	theirs := encodeCerts(first.authority)
	f.configure(
		admissionregistrationv1.WebhookClientConfig{Service: &admissionregistrationv1.ServiceReference{Namespace: "x", Name: "hook"},
			CABundle: theirs},
		admissionregistrationv1.WebhookClientConfig{Service: f.service()},
		admissionregistrationv1.WebhookClientConfig{Service: &admissionregistrationv1.ServiceReference{Namespace: f.ns, Name: "x"},
			CABundle: theirs},
		admissionregistrationv1.WebhookClientConfig{URL: ptr.To("https://localhost/pod/mutate"), CABundle: theirs},
	)
	for _, c := range []struct {
		what      string
		required  []*pair
		prune     bool
		needsTime bool
		want      []*pair
	}{
		{"the first one", []*pair{expired}, false, false, []*pair{expired}},
		{"another one; the expired one is removed", []*pair{first}, false, true, []*pair{first}},
		{"beside it", []*pair{second, first}, false, true, []*pair{second, first}},
		{"nothing to do, in another order", []*pair{first, second}, false, false, []*pair{second, first}},
		{"those of another leader stay", []*pair{third}, false, true, []*pair{third, second, first}},
		{"and are removed later", []*pair{third}, true, true, []*pair{third}},
	} {
		needsTime, err := f.m.publish(t.Context(), f.m.inUse(c.required...), c.prune)
		var want []*x509.Certificate
		for _, p := range c.want {
			want = append(want, p.authority)
		}
		if b := f.bundles(); err != nil || needsTime != c.needsTime || string(b[1]) != string(encodeCerts(want...)) {
			t.Errorf("%s: %t, %v, %d authorities", c.what, needsTime, err, len(parseCerts(b[1])))
		}
	}
	if b := f.bundles(); string(b[0]) != string(theirs) || string(b[2]) != string(theirs) || string(b[3]) != string(theirs) {
		t.Errorf("the webhooks of other programs were written: %q", b)
	}
	var many []*x509.Certificate
	for range maxBundle + 2 {
		many = append(many, f.pair(0).authority)
	}
	want, changed := bundleWith(many, []*x509.Certificate{first.authority}, false, time.Now())
	if len(want) != maxBundle || !changed || !want[0].Equal(first.authority) {
		t.Errorf("%d authorities", len(want))
	}
}

// TestFresh checks when a pair is renewed.
func TestFresh(t *testing.T) {
	hosts := []string{"hook", "hook.ns"}
	p, err := generate(hosts, 3*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	other, err := generate(hosts, 3*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	authority, begin := encodeCerts(p.authority), p.served.Leaf.NotBefore
	for name, c := range map[string]struct {
		p    *pair
		at   time.Duration // since the pair became valid
		host string
		want bool
	}{
		"new":                          {p, time.Hour, "hook", true},
		"two thirds":                   {p, 2 * time.Hour, "hook", true},
		"less than a third left":       {p, 2*time.Hour + time.Second, "hook", false},
		"expired":                      {p, 4 * time.Hour, "hook", false},
		"not valid yet":                {p, -time.Second, "hook", false},
		"another host":                 {p, time.Hour, "hook.other", false},
		"no Secret":                    {parsePair(nil, nil, nil), time.Hour, "hook", false},
		"the key of another pair":      {parsePair(p.cert, other.key, authority), time.Hour, "hook", false},
		"the authority of another":     {parsePair(p.cert, p.key, encodeCerts(other.authority)), time.Hour, "hook", false},
		"no authority":                 {parsePair(p.cert, p.key, nil), time.Hour, "hook", false},
		"read back":                    {parsePair(p.cert, p.key, authority), time.Hour, "hook", true},
		"the authority as a pair":      {parsePair(authority, p.key, authority), time.Hour, "hook", false},
		"garbage before the authority": {parsePair(p.cert, p.key, append([]byte("garbage\n"), authority...)), time.Hour, "hook", true},
	} {
		if got := c.p.fresh([]string{c.host}, begin.Add(c.at)); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
	if strings.Contains(string(p.cert)+string(authority), "KEY") || strings.Count(string(p.key), "PRIVATE KEY") != 2 {
		t.Error("there is more than one key")
	}
}

// TestForeign has a Secret and a configuration of other programs, which stay as they are.
func TestForeign(t *testing.T) {
	t.Parallel()
	f := setup(t, nil)
	theirs := encodeCerts(f.pair(0).authority)
	f.configure(admissionregistrationv1.WebhookClientConfig{
		Service: &admissionregistrationv1.ServiceReference{Namespace: "x", Name: "hook"}, CABundle: theirs,
	})
	secrets := f.client.CoreV1().Secrets(f.ns)
	secret, err := secrets.Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "certs", Labels: map[string]string{"a": "b"}}, Data: map[string][]byte{"password": []byte("x")},
	}, metav1.CreateOptions{})
	f.must(err)
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
	_, err = secrets.Update(t.Context(), secret, metav1.UpdateOptions{})
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
	secret.Data = map[string][]byte{certName: old.cert, keyName: old.key, authorityName: encodeCerts(old.authority)}
	secret, err := f.client.CoreV1().Secrets(f.ns).Update(t.Context(), secret, metav1.UpdateOptions{})
	f.must(err)
	if err := f.m.renew(t.Context()); err == nil || f.secret().ResourceVersion != secret.ResourceVersion {
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
		f.api = f.cp.UserConfig("system:serviceaccount:" + f.ns + ":storage-controller-nodecontroller")
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
	m, err := New(Config{Mode: Files}, nil, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	p, err := generate([]string{"hook"}, 3*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	begin := p.served.Leaf.NotBefore
	for _, c := range []struct {
		at      time.Duration
		problem string
	}{{-time.Minute, "not valid before"}, {-time.Second, "not valid before"}, {time.Minute, ""}, {time.Hour, ""},
		{4 * time.Hour, "expired"}} {
		m.now = func() time.Time { return begin.Add(c.at) }
		m.load(t.Context(), "test", p.cert, p.key)
		if err := m.Ready(); c.problem == "" && err != nil || c.problem != "" && (err == nil || !strings.Contains(err.Error(), c.problem)) {
			t.Errorf("at %v: %v", c.at, err)
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
		"namespace and name":  {Config{Mode: Secret, Secret: "b/a", Namespace: "own"}, "b/a"},
		"unknown namespace":   {Config{Mode: Secret, Secret: "a"}, "--webhook-cert-secret"},
		"too many parts":      {Config{Mode: Secret, Secret: "a/b/c"}, "--webhook-cert-secret"},
		"no Service":          {Config{Mode: SelfSigned, Secret: "b/a"}, "--webhook-service"},
		"files need no names": {Config{Mode: Files}, "/"},
	} {
		reg := prometheus.NewRegistry()
		m, err := New(c.cfg, nil, reg)
		if err == nil && m.secret.String() != c.want || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v", name, m, err)
		}
		families, err := reg.Gather()
		if problems, lint := promlint.NewWithMetricFamilies(families).Lint(); err != nil || lint != nil || len(problems) > 0 || m != nil &&
			len(families) != 3 {
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
	f.configure(admissionregistrationv1.WebhookClientConfig{Service: f.service(), CABundle: encodeCerts(old.authority)})
	var once sync.Once
	m := f.manager(kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method == http.MethodPatch {
			once.Do(func() {
				if _, err := f.m.publish(r.Context(), []*x509.Certificate{theirs.authority}, false); err != nil {
					t.Error(err)
				}
			})
		}
		pass.ServeHTTP(w, r)
	}))
	if needsTime, err := m.publish(t.Context(), []*x509.Certificate{mine.authority}, false); err != nil || !needsTime {
		t.Errorf("%t, %v", needsTime, err)
	}
	for _, p := range []*pair{old, mine, theirs} {
		f.must(f.trusts(p))
	}
}
