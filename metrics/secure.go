// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/klog/v2"
)

// User is the sender of a request, as the API server authenticated it.
type User struct {
	Name   string
	UID    string
	Groups []string
	Extra  map[string][]string
}

// Reviewer authenticates and authorizes requests, for example with the TokenReview and
// SubjectAccessReview APIs. An error means that the API server gave no answer.
type Reviewer interface {
	// Authenticate returns the user of a bearer token, or false if the token is not valid.
	Authenticate(ctx context.Context, token string) (user User, ok bool, err error)
	// Authorize reports whether user may use verb, such as get, on a path, such as /metrics.
	Authorize(ctx context.Context, user User, verb, path string) (allowed bool, err error)
}

// How long the answers of a [Reviewer] are cached. Failed authentications are not cached: a new
// token may become valid at any time.
const (
	tokenTTL = time.Minute
	allowTTL = 5 * time.Minute
	denyTTL  = 30 * time.Second
)

const (
	// reviewTimeout bounds authentication and authorization of one request.
	reviewTimeout = 10 * time.Second
	// knownTTL is how long a token that was valid is not limited like unknown ones.
	knownTTL = time.Hour
	// unknownQPS and unknownBurst limit the reviews of unknown tokens to half of what the process may send: a client without a
	// valid token cannot keep Prometheus from the metrics.
	unknownQPS, unknownBurst = 5, 10
	// maxCached bounds the entries of each cache.
	maxCached = 4096
)

// Guard authenticates and authorizes requests with a [Reviewer].
type Guard struct {
	reviewer  Reviewer
	users     *cache.LRUExpireCache // User by SHA-256 of the token; the token itself is not stored
	known     *cache.LRUExpireCache // the same hashes, for longer
	unknown   *rate.Limiter
	decisions *cache.LRUExpireCache // bool by the hash of user, verb and path
}

// NewGuard returns a guard that asks reviewer.
func NewGuard(reviewer Reviewer) *Guard {
	return &Guard{
		reviewer: reviewer, users: cache.NewLRUExpireCache(maxCached), decisions: cache.NewLRUExpireCache(maxCached),
		known: cache.NewLRUExpireCache(maxCached), unknown: rate.NewLimiter(unknownQPS, unknownBurst),
	}
}

// protect passes authorized requests to next. It answers 401 without a valid token, 403 without
// the permission, 429 to many unknown tokens, and 500 if the reviewer failed. A nil guard passes every request.
func (g *Guard) protect(next http.Handler) http.Handler {
	if g == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch status, err := g.review(r); {
		case err != nil:
			klog.FromContext(r.Context()).Error(err, "Reviewing a request for metrics failed", "path", r.URL.Path)
			http.Error(w, "reviewing the request failed; see the log of storage-controller", http.StatusInternalServerError)
		case status == http.StatusUnauthorized:
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "valid bearer token required", status)
		case status == http.StatusTooManyRequests:
			http.Error(w, errTooMany.Error(), status)
		case status != http.StatusOK:
			http.Error(w, fmt.Sprintf("no permission to %s %s", strings.ToLower(r.Method), r.URL.Path), status)
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// review returns the HTTP status for r, 200 if r is authorized.
func (g *Guard) review(r *http.Request) (int, error) {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "bearer") || token == "" {
		return http.StatusUnauthorized, nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), reviewTimeout)
	defer cancel()
	user, ok, err := g.authenticate(ctx, token)
	if errors.Is(err, errTooMany) {
		return http.StatusTooManyRequests, nil
	}
	if err != nil {
		return 0, fmt.Errorf("authenticating the bearer token: %w", err)
	}
	if !ok {
		return http.StatusUnauthorized, nil
	}
	allowed, err := g.authorize(ctx, user, strings.ToLower(r.Method), r.URL.Path)
	switch {
	case err != nil:
		return 0, fmt.Errorf("authorizing user %q: %w", user.Name, err)
	case !allowed:
		return http.StatusForbidden, nil
	}
	return http.StatusOK, nil
}

var errTooMany = errors.New("too many requests with unknown tokens")

func (g *Guard) authenticate(ctx context.Context, token string) (User, bool, error) {
	key := sha256.Sum256([]byte(token))
	if cached, ok := g.users.Get(key); ok {
		user, ok := cached.(User)
		return user, ok, nil
	}
	if _, known := g.known.Get(key); !known && !g.unknown.Allow() {
		return User{}, false, errTooMany
	}
	user, ok, err := g.reviewer.Authenticate(ctx, token)
	if err == nil && ok {
		g.users.Add(key, user, tokenTTL)
		g.known.Add(key, true, knownTTL)
	}
	return user, ok, err
}

func (g *Guard) authorize(ctx context.Context, user User, verb, path string) (bool, error) {
	// JSON gives every combination of user, verb and path a key of its own.
	key, err := json.Marshal(struct {
		User       User
		Verb, Path string
	}{user, verb, path})
	if err != nil {
		return false, err
	}
	hash := sha256.Sum256(key) // a path may be long
	if cached, ok := g.decisions.Get(hash); ok {
		return cached == true, nil
	}
	allowed, err := g.reviewer.Authorize(ctx, user, verb, path)
	if err != nil {
		return false, err
	}
	ttl := denyTTL
	if allowed {
		ttl = allowTTL
	}
	g.decisions.Add(hash, allowed, ttl)
	return allowed, nil
}
