package webhook

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// world is what the leader acts on, without an API server: time passes in leaps.
type world struct {
	t         *testing.T
	u         *upkeep
	f         upkeepFacts
	secret    map[string][]byte
	served    *x509.Certificate // by the slowest replica
	published bool              // once at least
}

func newWorld(t *testing.T) *world {
	return &world{t: t, u: &upkeep{}, f: upkeepFacts{
		now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), names: []string{"svc", "svc.ns"}, settle: 5 * time.Second, bundles: make([][]*x509.Certificate, 2),
	}}
}

// step makes one step of the leader, and is what it was.
func (w *world) step() upkeepAction {
	w.t.Helper()
	w.f.held = parseAuthority(w.secret)
	w.f.serving = w.served != nil && w.f.now.Before(w.served.NotAfter)
	w.f.published = w.u.notePublished(w.f)
	action, reason := decideUpkeep(w.f)
	if reason == "" {
		w.t.Error("no reason")
	}
	var data map[string][]byte
	var err error
	switch action {
	case doCreateAuthority:
		data, err = w.f.withNewAuthority()
	case doSign:
		data, err = w.f.withNewPair()
	case doPublish:
		w.published = true
		for i, b := range w.f.bundles {
			w.f.bundles[i] = w.f.wanted(b)
		}
	}
	if err != nil {
		w.t.Fatal(err)
	}
	if data != nil {
		next := map[string][]byte{}
		maps.Copy(next, w.secret)
		maps.Copy(next, data)
		w.secret = next
	}
	w.check(action)
	return action
}

// check is that API servers trust the pair of each replica: of one that is slow, and of
// one that has just begun with what is in the Secret.
func (w *world) check(after upkeepAction) {
	w.t.Helper()
	if !w.published {
		return
	}
	leaves := map[string]*x509.Certificate{"slow": w.served}
	if pair := parseCerts(w.secret[certName]); len(pair) > 0 {
		leaves["new"] = pair[0]
	}
	for who, leaf := range leaves {
		for _, b := range w.f.bundles {
			pool := x509.NewCertPool()
			for _, c := range b {
				pool.AddCert(c)
			}
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: w.f.now, DNSName: "svc.ns"}); err != nil {
				w.t.Fatalf("%v, after %v: the %s replica is not trusted: %v", w.f.now, after, who, err)
			}
			if len(b) > maxBundle {
				w.t.Errorf("%d authorities in a bundle", len(b))
			}
		}
	}
}

// settle takes all steps that are due, and has the replicas see what is in the Secret.
func (w *world) settle() {
	w.t.Helper()
	for range 10 {
		if w.step() == doNothing {
			w.f.now = w.f.now.Add(10 * time.Second)
			if w.step() == doNothing {
				break
			}
		}
	}
	w.served = parseCerts(w.secret[certName])[0]
}

func TestThirtyYears(t *testing.T) {
	w := newWorld(t)
	if a := w.step(); a != doCreateAuthority || len(w.secret) != 4 {
		t.Fatalf("it begins with %v, %d keys", a, len(w.secret))
	}
	w.served = parseCerts(w.secret[certName])[0] // which was just made
	authorities, pairs := map[string]bool{}, map[string]bool{}
	end := w.f.now.AddDate(30, 0, 0)
	for day := 0; w.f.now.Before(end); day++ {
		w.settle()
		if day%100 == 50 { // somebody applies the manifests again
			w.f.bundles = make([][]*x509.Certificate, 2)
			w.published = false
		}
		if day%400 == 60 { // or deletes the Secret
			w.secret = nil
		}
		held := parseAuthority(w.secret)
		if held.leaf != nil {
			authorities[held.cas[0].SerialNumber.String()], pairs[held.leaf.SerialNumber.String()] = true, true
			if len(held.cas) > 2 {
				t.Fatalf("%d authorities are kept", len(held.cas))
			}
		}
		w.f.now = w.f.now.Add(24 * time.Hour)
	}
	if len(authorities) < 20 || len(pairs) < 40 {
		t.Errorf("%d authorities and %d pairs: not much has happened", len(authorities), len(pairs))
	}
}

func TestAuthorityRotates(t *testing.T) {
	w := newWorld(t)
	w.step()
	w.served = parseCerts(w.secret[certName])[0]
	w.settle()
	first := parseAuthority(w.secret).cas[0]
	for i := 0; parseAuthority(w.secret).cas[0].Equal(first); i++ {
		if w.settle(); i > 3000 {
			t.Fatal("it never does")
		}
		w.f.now = w.f.now.Add(48 * time.Hour)
	}
	if age := w.f.now.Sub(first.NotBefore); age < caLife/2 || age > caLife*3/4 {
		t.Errorf("it does after %v", age)
	}
	w.settle()
	if b := w.f.bundles[0]; len(b) != 2 || !b[1].Equal(first) {
		t.Errorf("the old one is not there for those that still serve its pair: %d", len(b))
	}
	for range 300 {
		w.f.now = w.f.now.Add(24 * time.Hour)
		w.settle()
	}
	if b := w.f.bundles[0]; len(b) != 1 {
		t.Errorf("%d authorities are published a year later", len(b))
	}
}

func TestDecideUpkeep(t *testing.T) {
	now := time.Now()
	ca, key, _ := newCA(now, "a")
	other, otherKey, _ := newCA(now, "b")
	names := []string{"svc", "svc.ns"}
	leaf, _, _ := newLeaf(now, ca, key, names)
	foreignLeaf, _, _ := newLeaf(now, other, otherKey, names)
	otherNames, _, _ := newLeaf(now, ca, key, names[:1])
	held := authority{cas: []*x509.Certificate{ca}, key: key, leaf: leaf}
	with := func(leaf *x509.Certificate) authority { return authority{held.cas, key, leaf} }
	good, bad := [][]*x509.Certificate{{ca}}, [][]*x509.Certificate{{ca}, {other}}
	ago := now.Add(-time.Minute)
	for name, c := range map[string]struct {
		f    upkeepFacts
		want upkeepAction
	}{
		"nothing there":                             {upkeepFacts{}, doCreateAuthority},
		"all well":                                  {upkeepFacts{held: held, serving: true, bundles: good, published: ago}, doNothing},
		"no configuration":                          {upkeepFacts{held: held, serving: true, published: ago}, doNothing},
		"one webhook does not know it":              {upkeepFacts{held: held, serving: true, bundles: bad}, doPublish},
		"the configuration cannot be read":          {upkeepFacts{held: held, serving: true, unknown: true}, doNothing},
		"and nobody serves":                         {upkeepFacts{held: with(nil), unknown: true}, doSign},
		"no pair, others serve the old one":         {upkeepFacts{held: with(nil), serving: true, bundles: bad}, doPublish},
		"it is published, not long enough":          {upkeepFacts{held: with(nil), serving: true, bundles: good, published: now}, doNothing},
		"long enough":                               {upkeepFacts{held: with(nil), serving: true, bundles: good, published: ago}, doSign},
		"a pair of another authority":               {upkeepFacts{held: with(foreignLeaf), serving: true, bundles: good, published: ago}, doSign},
		"a pair for other names":                    {upkeepFacts{held: with(otherNames), serving: true, bundles: good, published: ago}, doSign},
		"two thirds of the life of the pair":        {upkeepFacts{now: now.Add(leafLife * 3 / 4), held: held, serving: true, bundles: good, published: ago}, doSign},
		"two thirds of the life of the authority":   {upkeepFacts{now: now.Add(caLife * 3 / 4), held: held, serving: true, bundles: good, published: ago}, doCreateAuthority},
		"a strange authority beside it, right away": {upkeepFacts{held: held, serving: true, bundles: [][]*x509.Certificate{{ca, other}}, published: ago}, doNothing},
		"and later":                                 {upkeepFacts{now: now.Add(2 * keepOld), held: held, serving: true, bundles: [][]*x509.Certificate{{ca, other}}, published: ago}, doPublish},
	} {
		c.f.names, c.f.settle = names, 5*time.Second
		if c.f.now.IsZero() {
			c.f.now = now
		}
		if got, reason := decideUpkeep(c.f); got != c.want || reason == "" {
			t.Errorf("%s: %v (%s), want %v", name, got, reason, c.want)
		}
	}
}

func TestParseAuthority(t *testing.T) {
	f := upkeepFacts{now: time.Now(), names: []string{"svc"}}
	good, err := f.withNewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	another, err := f.withNewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	if a := parseAuthority(good); len(a.cas) != 1 || a.leaf == nil {
		t.Fatalf("%v", a)
	}
	for name, c := range map[string]struct {
		key, value  string
		usable, has bool
	}{
		"no authority":            {caName, "", false, false},
		"garbage":                 {caName, "garbage", false, false},
		"a key of another":        {caKeyName, string(another[caKeyName]), false, false},
		"no key":                  {caKeyName, "", false, false},
		"a pair is no authority":  {caName, string(good[certName]), false, false},
		"a pair that is none":     {keyName, string(another[keyName]), true, false},
		"no pair":                 {certName, "", true, false},
		"a pair with another key": {certName, string(another[certName]), true, false},
	} {
		data := maps.Clone(good)
		data[c.key] = []byte(c.value)
		if a := parseAuthority(data); (len(a.cas) > 0) != c.usable || (a.leaf != nil) != c.has {
			t.Errorf("%s: %v", name, a)
		}
	}
}

// selfSigned is a fixture whose leader keeps the certificate in the Secret "certs".
func selfSigned(t *testing.T, change func(*fixture)) *fixture {
	t.Helper()
	t.Parallel()
	return setup(t, func(f *fixture) {
		f.cfg.CertMode, f.cfg.CertSecret, f.cfg.Service, f.cfg.ConfigName, f.cfg.OwnNamespace = CertSelfSigned, "certs", "hook", f.ns, f.ns
		if change != nil {
			change(f)
		}
	})
}

// emptyConfig makes a configuration for nobody, and is the authorities in it.
func (f *fixture) emptyConfig() func() string {
	f.Helper()
	f.configFor(admissionregistrationv1.WebhookClientConfig{Service: f.service()})
	return func() string { return f.bundles()[0] }
}

// service is that of the server.
func (f *fixture) service() *admissionregistrationv1.ServiceReference {
	return &admissionregistrationv1.ServiceReference{Namespace: f.ns, Name: "hook", Path: ptr.To("/pod/mutate")}
}

// configFor makes a configuration with a webhook, which is asked about nothing, for each of clients.
func (f *fixture) configFor(clients ...admissionregistrationv1.WebhookClientConfig) {
	f.Helper()
	config := &admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: f.ns}}
	for i, c := range clients {
		config.Webhooks = append(config.Webhooks, admissionregistrationv1.MutatingWebhook{
			Name: fmt.Sprintf("hook-%d.example.com", i), SideEffects: ptr.To(admissionregistrationv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"}, ClientConfig: c,
		})
	}
	f.install(config)
}

// bundles is the authorities in each webhook of the configuration.
func (f *fixture) bundles() (all []string) {
	f.Helper()
	config, err := f.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(f.Context(), f.ns, metav1.GetOptions{})
	f.must(err)
	for _, w := range config.Webhooks {
		all = append(all, string(w.ClientConfig.CABundle))
	}
	return all
}

// TestUpkeepSparesTheWebhooksOfSomebodyElse: who has the wrong name for the configuration must
// not have the API server distrust what another driver, or the same with a URL, serves there.
func TestUpkeepSparesTheWebhooksOfSomebodyElse(t *testing.T) {
	f := selfSigned(t, nil)
	theirs := encodeCerts(f.ca.cert)
	f.configFor(
		admissionregistrationv1.WebhookClientConfig{Service: &admissionregistrationv1.ServiceReference{Namespace: "csi-example", Name: "hook"}, CABundle: theirs},
		admissionregistrationv1.WebhookClientConfig{Service: f.service()},
		admissionregistrationv1.WebhookClientConfig{Service: &admissionregistrationv1.ServiceReference{Namespace: f.ns, Name: "another"}, CABundle: theirs},
		admissionregistrationv1.WebhookClientConfig{URL: ptr.To("https://localhost/pod/mutate"), CABundle: theirs},
	)
	f.lead()
	f.eventually("its own is published", func(context.Context) error {
		if b := f.bundles(); b[1] == "" || b[1] != string(f.secretData()[caName]) {
			return fmt.Errorf("it is %q", b[1])
		}
		return nil
	})
	if b := f.bundles(); b[0] != string(theirs) || b[2] != string(theirs) || b[3] != string(theirs) {
		t.Errorf("those of others were written: %q", b)
	}
	if n := f.metric("storage_controller_webhook_cert_upkeep_total", "result", "error"); n != 0 {
		t.Errorf("%v errors", n)
	}
}

// TestUpkeepMissesItsOwnWebhook: it serves with a certificate, and says what is wrong.
func TestUpkeepMissesItsOwnWebhook(t *testing.T) {
	f := selfSigned(t, nil)
	theirs := encodeCerts(f.ca.cert)
	f.configFor(admissionregistrationv1.WebhookClientConfig{Service: &admissionregistrationv1.ServiceReference{Namespace: "csi-example", Name: "hook"}, CABundle: theirs})
	f.lead()
	f.eventually("the error is counted", func(context.Context) error {
		if f.metric("storage_controller_webhook_cert_upkeep_total", "result", "error") == 0 {
			return errors.New("not yet")
		}
		return f.s.Ready()
	})
	if b := f.bundles(); b[0] != string(theirs) {
		t.Errorf("that of somebody else was written: %q", b)
	}
}

func (f *fixture) secretData() map[string][]byte {
	f.Helper()
	secret, err := f.client.CoreV1().Secrets(f.ns).Get(f.Context(), "certs", metav1.GetOptions{})
	f.must(err)
	return secret.Data
}

func TestUpkeepSparesTheSecretOfSomebodyElse(t *testing.T) {
	f := selfSigned(t, nil)
	secret, err := f.client.CoreV1().Secrets(f.ns).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "certs"}, Data: map[string][]byte{"password": []byte("x")}}, metav1.CreateOptions{})
	f.must(err)
	f.lead()
	f.eventually("an error is counted", func(context.Context) error {
		if f.metric("storage_controller_webhook_cert_upkeep_total", "result", "error") < 2 {
			return errors.New("not yet")
		}
		return nil
	})
	now, err := f.client.CoreV1().Secrets(f.ns).Get(t.Context(), "certs", metav1.GetOptions{})
	f.must(err)
	if now.ResourceVersion != secret.ResourceVersion {
		t.Errorf("it was written: %v", now)
	}
	if err := f.s.Ready(); err == nil {
		t.Error("ready without a certificate")
	}
}

func TestUpkeepFillsAnEmptySecret(t *testing.T) {
	f := selfSigned(t, nil)
	_, err := f.client.CoreV1().Secrets(f.ns).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "certs", Labels: map[string]string{"a": "b"}}}, metav1.CreateOptions{})
	f.must(err)
	f.lead()
	f.eventually("it is ready", func(context.Context) error { return f.s.Ready() })
	secret, err := f.client.CoreV1().Secrets(f.ns).Get(t.Context(), "certs", metav1.GetOptions{})
	f.must(err)
	if secret.Labels["a"] != "b" || secret.Annotations[annService] != f.ns+"/hook" {
		t.Errorf("%v", secret.ObjectMeta)
	}
}

// Two that take each other for gone, and a proxy that has both write at the same time.
func TestUpkeepByTwoLeaders(t *testing.T) {
	var arrived atomic.Int32
	both := make(chan struct{})
	meet := func(f *fixture) {
		f.api = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/secrets") {
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
	f := selfSigned(t, meet)
	second := setup(t, func(g *fixture) { g.cfg = f.cfg; meet(g) })
	bundle := f.emptyConfig()
	f.lead()
	second.lead()
	for _, x := range []*fixture{f, second} {
		x.eventually("both serve what is in the Secret, and it is published", func(context.Context) error {
			if _, err := dial(x.s.Address(), "hook."+f.ns+".svc", parseCerts([]byte(bundle()))...); err != nil {
				return err
			}
			return x.s.Ready()
		})
	}
	if n := arrived.Load(); n != 2 {
		t.Errorf("%d tried to make the Secret, want 2", n)
	}
	data := f.secretData()
	leaf := parseCerts(data[certName])[0]
	for _, x := range []*fixture{f, second} {
		if got, err := dial(x.s.Address(), "hook", parseCerts(data[caName])...); err != nil || !got.Equal(leaf) {
			t.Errorf("another pair is served: %v", err)
		}
	}
}

func TestUpkeepWithoutPermissionForTheConfiguration(t *testing.T) {
	var forbidden atomic.Bool
	forbidden.Store(true)
	f := selfSigned(t, func(f *fixture) {
		f.api = kubetest.Proxy(t, f.cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			if forbidden.Load() && strings.Contains(r.URL.Path, "/mutatingwebhookconfigurations/") {
				http.Error(w, "no", http.StatusForbidden)
				return
			}
			pass.ServeHTTP(w, r)
		})
	})
	bundle := f.emptyConfig()
	f.lead()
	f.eventually("it serves all the same", func(context.Context) error { return f.s.Ready() })
	f.eventually("the error is counted", func(context.Context) error {
		if f.metric("storage_controller_webhook_cert_upkeep_total", "result", "error") == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	if bundle() != "" {
		t.Error("it was published?")
	}
	forbidden.Store(false)
	f.eventually("it is published", func(context.Context) error {
		if bundle() != string(f.secretData()[caName]) {
			return fmt.Errorf("it is %q", bundle())
		}
		return nil
	})
}

// The clock of the server leaps by seven years, by which the authority has to change.
func TestUpkeepRenewsTheAuthority(t *testing.T) {
	var leap atomic.Int64
	f := selfSigned(t, func(f *fixture) {
		f.hook = func(s *Server) { s.keeper.now = func() time.Time { return time.Now().Add(time.Duration(leap.Load())) } }
	})
	bundle := f.emptyConfig()
	var terms sync.WaitGroup
	stop := f.lead()
	f.eventually("it is published", func(context.Context) error {
		if err := f.s.Ready(); err != nil || bundle() == "" {
			return fmt.Errorf("%q, %v", bundle(), err)
		}
		return nil
	})
	first := f.secretData()
	stop() // a term in between
	terms.Wait()
	leap.Store(int64(caLife / 10 * 7))
	f.lead()
	f.eventually("a new authority signs, and is trusted together with the old one", func(context.Context) error {
		data := f.secretData()
		a, old := parseAuthority(data), parseCerts(first[caName])[0]
		published := parseCerts([]byte(bundle()))
		switch {
		case a.cas[0].Equal(old), a.leaf == nil, a.leaf.CheckSignatureFrom(a.cas[0]) != nil, f.s.keeper.current.Load().Leaf.SerialNumber.Cmp(a.leaf.SerialNumber) != 0:
			return errors.New("not yet")
		case len(published) != 2 || !published[0].Equal(a.cas[0]) || !published[1].Equal(old):
			return fmt.Errorf("%d authorities are published", len(published))
		}
		return f.s.Ready()
	})
}
