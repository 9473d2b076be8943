// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

// Request identifies a request for [Hooks].
type Request struct {
	ID          uint64 // the same in all hooks, and that of no other request
	Client      string // the name that was given to [Server.Config]
	User        string // the impersonated user, else Client
	UserAgent   string
	Verb        string // get, list, watch, create, update, patch, delete, deletecollection
	Resource    schema.GroupVersionResource
	Subresource string
	Namespace   string
	Name        string // empty for lists, and for a create
	Initial     bool   // of a watch: it begins with all objects
	Body        []byte
	execute     func() Result
}

// Execute executes a request that is not a watch without the hooks, also after its client has given up.
func (r Request) Execute() Result { return r.execute() }

// Result is the result of a request, before its response is encoded.
type Result struct {
	Code   int
	Object runtime.Object // of the response; nil: an error, or a watch. It must not be modified
}

// Hooks changes what happens to requests. All fields are optional. The functions are called concurrently and, except for
// Cached, without locks. They may block: until that ends, the request is in transit.
type Hooks struct {
	// Allow reports whether the user has the permission for the request.
	Allow func(Request) bool
	// Before is called before the request takes effect. The client gets its error instead of a
	// response: an [apierrors.APIStatus] as a response of the server, another error as one of the network.
	Before func(context.Context, Request) error
	// After is called after the request took effect, also if the client has canceled it. The client gets its error as in Before.
	After func(context.Context, Request, Result) error
	// Deliver is called before an event of a watch is sent. An error ends the watch: an
	// [apierrors.APIStatus] is sent as an event, another error is one of the network.
	Deliver func(context.Context, Request, watch.EventType, metav1.Object) error
	// Mutate changes an object before it is validated and stored, as a webhook does. The lock of the server is held.
	Mutate func(Request, runtime.Object)
	// Late reports, after Before and After have returned, whether the client reads the response although it has canceled the request.
	Late func(Request) bool
	// WatchTimeout returns after what time the server ends a watch whose client asks for that time; nil: after that time.
	WatchTimeout func(Request, time.Duration) time.Duration
	// UID returns the UID of a new object; nil: numbers. The lock of the server is held.
	UID func() types.UID
	// Cached returns the resourceVersion that the API server of the client has observed. Reads from
	// its cache (resourceVersion "0") return the state at that version. It must not decrease. The lock of the server is held.
	Cached func(Request) uint64
}

// Server is an API server in memory. All methods may be called concurrently.
type Server struct {
	hooks     Hooks
	clock     clock
	resources map[schema.GroupVersionResource]*resource
	requests  atomic.Uint64
	encodings encodings

	mu        sync.Mutex
	version   uint64 // the resourceVersion of the last write
	compacted uint64 // changes up to this resourceVersion are not in log
	ids       uint64 // of generated UIDs and names
	objects   map[*resource]map[string]runtime.Object
	log       []change
	watches   []*watcher
}

// New returns a server with the namespaces that every cluster has.
func New(hooks Hooks) *Server {
	s := &Server{
		hooks:     hooks,
		resources: map[schema.GroupVersionResource]*resource{},
		version:   1,
		encodings: encodings{known: map[encoding][]byte{}},
		objects:   map[*resource]map[string]runtime.Object{},
	}
	for _, r := range resources(&s.clock) {
		s.resources[r.gvr] = r
		s.objects[r] = map[string]runtime.Object{}
	}
	for _, name := range []string{metav1.NamespaceDefault, "kube-node-lease", metav1.NamespacePublic, metav1.NamespaceSystem} {
		s.addNamespace(name)
	}
	return s
}

// Config returns the configuration of a client with that name, without a rate limit.
func (s *Server) Config(client string) *rest.Config {
	return &rest.Config{Host: "http://apiserver.invalid", QPS: -1, Transport: transport{s, client}}
}

// Version returns the resourceVersion of the last write.
func (s *Server) Version() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version
}

// Compact removes the history up to version: watches and pages from before get 410 Gone.
func (s *Server) Compact(version uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.compacted = max(s.compacted, min(version, s.version))
	n := slices.IndexFunc(s.log, func(c change) bool { return c.version > s.compacted })
	if n < 0 {
		n = len(s.log)
	}
	s.log = slices.Clone(s.log[n:])
}

// CloseWatches ends the watches that match selects, as an API server does that shuts down. Events that
// were not read are not sent. With a non-nil err, the connection breaks.
func (s *Server) CloseWatches(match func(Request) bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeWatches(func(w *watcher) bool { return match(w.call.Request) }, err)
}

// List returns the objects of a resource, ordered by namespace and name. They must not be modified.
func (s *Server) List(gvr schema.GroupVersionResource) []runtime.Object {
	s.mu.Lock()
	defer s.mu.Unlock()
	objects := s.objects[s.resources[gvr]]
	var list []runtime.Object
	for _, key := range sortedKeys(objects) {
		list = append(list, objects[key])
	}
	return list
}

// Get returns an object, or nil. It must not be modified.
func (s *Server) Get(gvr schema.GroupVersionResource, namespace, name string) runtime.Object {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.objects[s.resources[gvr]][key(namespace, name)]
}

// transport is the connection of one client.
type transport struct {
	server *Server
	client string
}

// RoundTrip implements [http.RoundTripper].
func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	var body []byte
	if r.Body != nil {
		defer r.Body.Close()
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
	}
	c := t.server.parse(r, t.client)
	c.ID, c.Body = t.server.requests.Add(1), body
	resp, err := t.server.serve(r.Context(), c)
	if err != nil {
		return nil, err
	}
	resp.Request, resp.Proto, resp.ProtoMajor, resp.ProtoMinor = r, "HTTP/1.1", 1, 1
	return resp, nil
}

// serve processes a request between the hooks. An error is one of the network.
func (s *Server) serve(ctx context.Context, c *call) (*http.Response, error) {
	if c.static != nil {
		return c.static, nil
	}
	c.execute = func() Result {
		code, obj, _ := s.execute(context.Background(), c)
		return Result{code, obj}
	}
	if s.hooks.Before != nil {
		if err := s.hooks.Before(ctx, c.Request); err != nil {
			return c.refuse(err)
		}
	}
	if err := s.canceled(ctx, c); err != nil {
		return nil, err
	}
	resp, result := s.process(ctx, c)
	var err error
	if s.hooks.After != nil {
		err = s.hooks.After(ctx, c.Request, result)
	}
	err = cmp.Or(s.canceled(ctx, c), err)
	if err == nil {
		return resp, nil
	}
	resp.Body.Close()
	return c.refuse(err)
}

// mutate has [Hooks.Mutate] change obj, unless c is for a subresource.
func (s *Server) mutate(c *call, obj runtime.Object) {
	if s.hooks.Mutate != nil && c.Subresource == "" {
		s.hooks.Mutate(c.Request, obj)
	}
}

// canceled returns why the client of c does not wait for the response, or nil.
func (s *Server) canceled(ctx context.Context, c *call) error {
	if s.hooks.Late != nil && s.hooks.Late(c.Request) {
		return nil
	}
	return ctx.Err()
}

// process authorizes and executes a request.
func (s *Server) process(ctx context.Context, c *call) (*http.Response, Result) {
	failed := func(err error) (*http.Response, Result) {
		resp := c.failure(err)
		return resp, Result{Code: resp.StatusCode}
	}
	if s.hooks.Allow != nil && !s.hooks.Allow(c.Request) {
		return failed(c.forbidden())
	}
	if c.Verb == "watch" {
		w, err := s.watch(ctx, c)
		if err != nil {
			return failed(err)
		}
		header := http.Header{"Content-Type": {c.media.stream()}}
		return &http.Response{StatusCode: http.StatusOK, Status: "200 OK", Header: header, Body: w}, Result{Code: http.StatusOK}
	}
	code, obj, err := s.execute(ctx, c)
	if err != nil {
		return failed(err)
	}
	return s.success(c, code, obj), Result{code, obj}
}

// execute runs a request that is not a watch and returns the status code and the object of the response.
func (s *Server) execute(ctx context.Context, c *call) (int, runtime.Object, error) {
	if c.Verb == "list" && s.tooLarge(c) {
		return 0, nil, s.waitTooLarge(ctx, c)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch c.Verb {
	case "get":
		return s.get(c)
	case "list":
		return s.list(c)
	case "create":
		if c.Subresource == "binding" {
			return s.bind(c)
		}
		if c.res.kind == "SelfSubjectAccessReview" {
			return s.review(c)
		}
		return s.create(c)
	case "update":
		return s.put(c)
	case "patch":
		return s.patch(c)
	case "delete":
		return s.delete(c)
	case "deletecollection":
		return s.deleteCollection(c)
	}
	return 0, nil, apierrors.NewMethodNotSupported(c.res.gvr.GroupResource(), c.Verb)
}

// refuse returns err as a response if it is one of the API, else as an error of the network.
func (c *call) refuse(err error) (*http.Response, error) {
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		return c.failure(err), nil
	}
	return nil, err
}

// respond returns a response with a complete body.
func respond(code int, contentType string, body []byte) *http.Response {
	return &http.Response{
		StatusCode: code, Status: strconv.Itoa(code) + " " + http.StatusText(code), ContentLength: int64(len(body)),
		Header: http.Header{"Content-Type": {contentType}}, Body: io.NopCloser(bytes.NewReader(body)),
	}
}

// SetClock sets by how much the clock of the server is ahead of that of its clients. A negative offset means behind.
func (s *Server) SetClock(offset time.Duration) { s.clock.ahead.Store(int64(offset)) }

// clock is the clock of a server.
type clock struct{ ahead atomic.Int64 }

// now returns the time in the precision of the API.
func (c *clock) now() metav1.Time {
	return metav1.NewTime(time.Now().Add(time.Duration(c.ahead.Load())).Truncate(time.Second))
}
