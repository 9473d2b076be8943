package metrics

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"math/big"
	"net/http"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// User is who asks for something.
type User struct {
	Name   string
	UID    string
	Groups []string
	Extra  map[string][]string
}

// Reviewer knows tokens and permissions; here that is the API server. An error of
// either method means that it could not be asked.
type Reviewer interface {
	// Authenticate tells whose token that is; ok is false for one that is nobody's.
	Authenticate(ctx context.Context, token string) (user User, ok bool, err error)
	// Authorize tells whether user may do verb, such as get, with path, such as /metrics.
	Authorize(ctx context.Context, user User, verb, path string) (allowed bool, err error)
}

// How long the answers of a [Reviewer] are believed. Tokens that are nobody's are not
// remembered: one that is not known yet may be so in a moment.
const (
	tokenTTL = time.Minute
	allowTTL = 5 * time.Minute
	denyTTL  = 30 * time.Second
)

const (
	// reviewTimeout bounds the two questions about one request.
	reviewTimeout = 10 * time.Second
	// maxRemembered bounds each of the two memories, so that nobody fills them.
	maxRemembered = 4096
	// certificateLife and renewBefore are of the certificate that the guard makes itself.
	certificateLife = 365 * 24 * time.Hour
	renewBefore     = 30 * 24 * time.Hour
)

// Guard lets only those through whom its reviewer allows that.
type Guard struct {
	reviewer Reviewer
	now      func() time.Time
	users    memory[[sha256.Size]byte, User] // by the hash of the token, which itself is kept nowhere
	allowed  memory[string, bool]            // by the JSON of a question

	mu          sync.Mutex
	certificate *tls.Certificate
}

// NewGuard makes a guard that asks reviewer.
func NewGuard(reviewer Reviewer) *Guard { return newGuard(reviewer, time.Now) }

func newGuard(reviewer Reviewer, now func() time.Time) *Guard {
	return &Guard{reviewer: reviewer, now: now}
}

// protect is next for those who may see it; a nil guard protects nothing. Without a
// token that is somebody's the answer is 401, without the permission 403, and 500 where
// that could not be found out.
func (g *Guard) protect(next http.Handler) http.Handler {
	if g == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch status, err := g.review(r); {
		case err != nil:
			klog.FromContext(r.Context()).Error(err, "Cannot tell who asks for metrics, and whether that is permitted", "path", r.URL.Path)
			http.Error(w, "the review of the request has failed, see the log", http.StatusInternalServerError)
		case status == http.StatusUnauthorized:
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "a bearer token is needed that the API server knows", status)
		case status != http.StatusOK:
			http.Error(w, fmt.Sprintf("no permission to %s %s", strings.ToLower(r.Method), r.URL.Path), status)
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// review is the status of the answer to r: 200 where r may go on.
func (g *Guard) review(r *http.Request) (int, error) {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if token = strings.TrimSpace(token); !strings.EqualFold(scheme, "bearer") || token == "" {
		return http.StatusUnauthorized, nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), reviewTimeout)
	defer cancel()
	user, ok, err := g.authenticate(ctx, token)
	if err != nil {
		return 0, fmt.Errorf("reviewing a token: %w", err)
	}
	if !ok {
		return http.StatusUnauthorized, nil
	}
	allowed, err := g.authorize(ctx, user, strings.ToLower(r.Method), r.URL.Path)
	switch {
	case err != nil:
		return 0, fmt.Errorf("reviewing the permission of %q: %w", user.Name, err)
	case !allowed:
		return http.StatusForbidden, nil
	}
	return http.StatusOK, nil
}

func (g *Guard) authenticate(ctx context.Context, token string) (User, bool, error) {
	key := sha256.Sum256([]byte(token))
	if user, ok := g.users.get(key, g.now()); ok {
		return user, true, nil
	}
	user, ok, err := g.reviewer.Authenticate(ctx, token)
	if err == nil && ok {
		g.users.put(key, user, g.now(), tokenTTL)
	}
	return user, ok, err
}

func (g *Guard) authorize(ctx context.Context, user User, verb, path string) (bool, error) {
	// JSON, so that no two questions have the same key, whatever is in the names.
	question, err := json.Marshal(struct {
		User       User
		Verb, Path string
	}{user, verb, path})
	if err != nil {
		return false, err
	}
	if allowed, ok := g.allowed.get(string(question), g.now()); ok {
		return allowed, nil
	}
	allowed, err := g.reviewer.Authorize(ctx, user, verb, path)
	if err != nil {
		return false, err
	}
	ttl := denyTTL
	if allowed {
		ttl = allowTTL
	}
	g.allowed.put(string(question), allowed, g.now(), ttl)
	return allowed, nil
}

// memory is answers that are believed for a while.
type memory[K comparable, V any] struct {
	mu      sync.Mutex
	answers map[K]answer[V]
}

type answer[V any] struct {
	value V
	until time.Time
}

func (m *memory[K, V]) get(key K, now time.Time) (V, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.answers[key]
	if !ok || !now.Before(a.until) {
		var none V
		return none, false
	}
	return a.value, true
}

// put forgets everything when there is too much of it: that costs a review each, and
// keeps no list of what is oldest.
func (m *memory[K, V]) put(key K, value V, now time.Time, ttl time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.answers == nil || len(m.answers) >= maxRemembered {
		m.answers = map[K]answer[V]{}
	}
	m.answers[key] = answer[V]{value, now.Add(ttl)}
}

// tlsConfig serves a certificate that the guard signs itself: it keeps tokens from being
// read on the way, and its owner cannot be verified.
func (g *Guard) tlsConfig() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.certificate == nil || g.now().After(g.certificate.Leaf.NotAfter.Add(-renewBefore)) {
			certificate, err := selfSigned(g.now())
			if err != nil {
				return nil, fmt.Errorf("making a certificate for the metrics: %w", err)
			}
			g.certificate = certificate
		}
		return g.certificate, nil
	}}
}

func selfSigned(now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "storage-controller"},
		DNSNames:     []string{"localhost"},
		NotBefore:    now.Add(-time.Hour), // clocks differ
		NotAfter:     now.Add(certificateLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}
