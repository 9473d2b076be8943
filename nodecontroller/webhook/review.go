// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"runtime/debug"
	"time"

	"golang.org/x/sync/semaphore"
	admissionv1 "k8s.io/api/admission/v1"
	"k8s.io/klog/v2"
)

const (
	maxBody = 8 << 20 // bytes; the API server takes objects of 3 MiB at most
	// maxTime bounds a response. If the timeout of the API server is shorter, the response is sent
	// responseTime before it.
	maxTime      = 10 * time.Second
	responseTime = 500 * time.Millisecond
	// maxBodies bounds the bytes of all requests that are being served, in decoded form several times as many: any client that reaches
	// the port could end the process otherwise.
	maxBodies = 2 * maxBody
)

// request is a decoded admission request; its object is still encoded.
type request = admissionv1.AdmissionRequest

// mutation handles the creation of objects of a resource.
type mutation struct {
	resource string
	decide   func(context.Context, *request) (verdict, error)
}

// applies reports whether r creates an object of m. Other requests are allowed: a configuration that
// sends too much must block nothing.
func (m mutation) applies(r *request) bool {
	return r.Operation == admissionv1.Create && r.SubResource == "" &&
		r.Resource.Group == "" && r.Resource.Version == "v1" && r.Resource.Resource == m.resource
}

// refusal is an error with its HTTP status; other errors have status 500. The failurePolicy decides
// whether the object is created.
type refusal struct {
	code int
	error
}

func refuse(code int, format string, args ...any) error {
	return refusal{code, fmt.Errorf(format, args...)}
}

func badRequest(format string, args ...any) error {
	return refuse(http.StatusBadRequest, format, args...)
}

// recoverAs recovers from a panic and stores it in err. It is deferred.
func recoverAs(ctx context.Context, err *error) {
	if p := recover(); p != nil {
		klog.FromContext(ctx).Error(nil, "Recovered from a panic", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		*err = fmt.Errorf("panic: %v", p)
	}
}

// ServeHTTP serves one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	begin := time.Now()
	s.metrics.inFlight.Inc()
	defer s.metrics.inFlight.Dec()
	path := r.URL.Path
	if _, known := s.mutations[path]; !known {
		path = "other" // clients must not create label values
	}
	body, patched, err := s.respond(r)
	code := http.StatusOK
	if err == nil {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body) // fails if the client closed the connection
	} else {
		code = http.StatusInternalServerError
		log := klog.FromContext(r.Context())
		if refused := (refusal{}); errors.As(err, &refused) {
			code, log = refused.code, log.V(1) // any client can cause these
		}
		if code == http.StatusMethodNotAllowed {
			w.Header().Set("Allow", http.MethodPost)
		}
		http.Error(w, err.Error(), code)
		log.Info("Admission request rejected", "path", path, "code", code, "cause", err.Error())
	}
	s.metrics.served(path, code, patched, time.Since(begin))
}

// respond returns the body of the response to r, and whether it has a patch.
func (s *Server) respond(r *http.Request) (body []byte, patched bool, err error) {
	m, known := s.mutations[r.URL.Path]
	media, _, mediaErr := mime.ParseMediaType(r.Header.Get("Content-Type"))
	switch {
	case !known:
		return nil, false, refuse(http.StatusNotFound, "this path is not served")
	case r.Method != http.MethodPost:
		return nil, false, refuse(http.StatusMethodNotAllowed, "the method must be POST")
	case mediaErr != nil || media != "application/json":
		return nil, false, refuse(http.StatusUnsupportedMediaType, "the content type must be application/json")
	}
	content := &limitedBody{body: r.Body, all: s.bodies}
	defer content.release()
	review, err := readReview(content)
	if err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), deadline(r.URL.Query().Get("timeout")))
	defer cancel()
	log := klog.FromContext(ctx).WithValues("path", r.URL.Path, "uid", review.Request.UID, "namespace", review.Request.Namespace)
	v, err := m.handle(klog.NewContext(ctx, log), review.Request)
	if err != nil {
		return nil, false, err
	}
	log.V(2).Info("Decided", "reason", v.reason, "operations", len(v.patch))
	answer := admissionv1.AdmissionReview{
		TypeMeta: review.TypeMeta, // in the version of the request
		Response: &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true, Warnings: v.warnings},
	}
	if len(v.patch) > 0 {
		answer.Response.PatchType = new(admissionv1.PatchTypeJSONPatch)
		if answer.Response.Patch, err = json.Marshal(v.patch); err != nil {
			return nil, false, fmt.Errorf("encoding the patch: %w", err)
		}
	}
	if body, err = json.Marshal(answer); err != nil {
		return nil, false, fmt.Errorf("encoding the response: %w", err)
	}
	return body, len(v.patch) > 0, nil
}

// handle returns the verdict about r. A panic is an error of this request only.
func (m mutation) handle(ctx context.Context, r *request) (v verdict, err error) {
	defer recoverAs(ctx, &err)
	if !m.applies(r) {
		return verdict{reason: "NotApplicable"}, nil
	}
	if r.Namespace == "" {
		return verdict{}, badRequest("the request for a %s names no namespace", m.resource)
	}
	return m.decide(ctx, r)
}

// limitedBody is a body whose bytes count in the limit of all requests from when they arrive until release.
type limitedBody struct {
	body io.Reader
	all  *semaphore.Weighted
	read int64
}

func (l *limitedBody) Read(p []byte) (int, error) {
	n, err := l.body.Read(p)
	if !l.all.TryAcquire(int64(n)) {
		return 0, refuse(http.StatusServiceUnavailable, "the requests that are being served have %d bytes", maxBodies)
	}
	l.read += int64(n)
	return n, err
}

func (l *limitedBody) release() { l.all.Release(l.read) }

// readReview decodes an AdmissionReview with a request. Up to a limit it also reads a body that is too large,
// because many clients read the response only after they have sent everything.
func readReview(body io.Reader) (*admissionv1.AdmissionReview, error) {
	data, err := io.ReadAll(io.LimitReader(body, maxBody+1))
	switch {
	case errors.As(err, new(refusal)):
		return nil, err
	case err != nil:
		return nil, badRequest("reading the request: %w", err)
	}
	if len(data) > maxBody {
		_, _ = io.CopyN(io.Discard, body, maxBody)
		return nil, refuse(http.StatusRequestEntityTooLarge, "the request has more than %d bytes", maxBody)
	}
	review := &admissionv1.AdmissionReview{}
	if err := decode(data, review); err != nil {
		return nil, badRequest("decoding the AdmissionReview: %w", err)
	}
	version := review.APIVersion
	switch {
	case review.Kind != "AdmissionReview" || version != "admission.k8s.io/v1" && version != "admission.k8s.io/v1beta1":
		return nil, badRequest("want an AdmissionReview of admission.k8s.io/v1 or v1beta1, got %.70q of %.70q", review.Kind, version)
	case review.Request == nil || review.Request.UID == "":
		return nil, badRequest("the AdmissionReview has no request with a uid")
	}
	return review, nil
}

// deadline returns how long a response may take if the API server waits for timeout, a duration or "".
func deadline(timeout string) time.Duration {
	if limit, err := time.ParseDuration(timeout); err == nil {
		return min(limit-responseTime, maxTime)
	}
	return maxTime
}
