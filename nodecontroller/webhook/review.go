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

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

const (
	maxBody = 8 << 20 // bytes; the API server takes objects of 3 MiB at most
	// maxTime bounds an answer; where the API server gives up earlier, the answer is
	// answerTime earlier than that.
	maxTime    = 10 * time.Second
	answerTime = 500 * time.Millisecond
)

// review is what is read of an AdmissionReview. Everything else, such as who asks, is
// nothing that an answer depends on.
type review struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Request    *request `json:"request"`
}

type request struct {
	UID         types.UID                   `json:"uid"`
	Resource    metav1.GroupVersionResource `json:"resource"`
	SubResource string                      `json:"subResource"`
	Operation   string                      `json:"operation"`
	Namespace   string                      `json:"namespace"`
	Object      json.RawMessage             `json:"object"`
}

// mutation is what is served under a path: what becomes of new objects of a resource.
type mutation struct {
	resource string
	decide   func(context.Context, *request) (verdict, error)
}

// applies tells whether r is what m is for. A configuration that sends more than it
// should must not stand in the way of it.
func (m mutation) applies(r *request) bool {
	return r.Operation == string(admissionv1.Create) && r.SubResource == "" &&
		r.Resource.Group == "" && r.Resource.Version == "v1" && r.Resource.Resource == m.resource
}

// refusal is an error with the HTTP status that it is answered with; others are 500.
// The failure policy of the administrator decides what that means for the object.
type refusal struct {
	code int
	error
}

func (r refusal) Unwrap() error { return r.error }

func refuse(code int, format string, args ...any) error {
	return refusal{code, fmt.Errorf(format, args...)}
}

func badRequest(format string, args ...any) error {
	return refuse(http.StatusBadRequest, format, args...)
}

// panicked makes an error of a recovered panic.
func panicked(ctx context.Context, p any) error {
	klog.FromContext(ctx).Error(nil, "Recovered from a panic", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	return fmt.Errorf("panic: %v", p)
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	begin := time.Now()
	s.metrics.inFlight.Inc()
	defer s.metrics.inFlight.Dec()
	path := r.URL.Path
	m, known := s.mutations[path]
	if !known {
		path = "other" // a label must not grow with what people try
	}
	body, patched, err := s.answer(r, m, known)
	code := http.StatusOK
	if err == nil {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body) // who does not listen any more has given up
	} else {
		code = http.StatusInternalServerError
		if refused := (refusal{}); errors.As(err, &refused) {
			code = refused.code
		}
		if code == http.StatusMethodNotAllowed {
			w.Header().Set("Allow", http.MethodPost)
		}
		http.Error(w, err.Error(), code)
		log := klog.FromContext(r.Context())
		if code < http.StatusInternalServerError { // anybody may send nonsense, and often
			log = log.V(1)
		}
		log.Info("Refused an admission request", "path", path, "code", code, "cause", err.Error())
	}
	s.metrics.answered(path, code, patched, time.Since(begin))
}

// answer is the body of the answer to r, and whether it has a patch.
func (s *Server) answer(r *http.Request, m mutation, known bool) (body []byte, patched bool, err error) {
	media, _, mediaErr := mime.ParseMediaType(r.Header.Get("Content-Type"))
	switch {
	case !known:
		return nil, false, refuse(http.StatusNotFound, "nothing is served under this path")
	case r.Method != http.MethodPost:
		return nil, false, refuse(http.StatusMethodNotAllowed, "only POST is answered here")
	case mediaErr != nil || media != "application/json":
		return nil, false, refuse(http.StatusUnsupportedMediaType, "the content type must be application/json")
	}
	data, err := readBody(r)
	if err != nil {
		return nil, false, err
	}
	asked, err := parseReview(data)
	if err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), deadline(r.URL.Query().Get("timeout")))
	defer cancel()
	log := klog.FromContext(ctx).WithValues("path", r.URL.Path, "uid", asked.Request.UID, "namespace", asked.Request.Namespace)
	v, err := decided(klog.NewContext(ctx, log), m, asked.Request)
	if err != nil {
		return nil, false, err
	}
	log.V(2).Info("Decided", "reason", v.reason, "operations", len(v.patch))
	body, err = asked.reply(v)
	return body, len(v.patch) > 0, err
}

// decided is what m says about r. A panic on the way is an error: the next request may
// have nothing to do with it.
func decided(ctx context.Context, m mutation, r *request) (v verdict, err error) {
	defer func() {
		if p := recover(); p != nil {
			v, err = verdict{}, panicked(ctx, p)
		}
	}()
	if !m.applies(r) {
		return verdict{reason: "NotConcerned"}, nil
	}
	if r.Namespace == "" {
		return verdict{}, badRequest("the request for a %s names no namespace", m.resource)
	}
	return m.decide(ctx, r)
}

// readBody is the whole body. One that is too large is read on for a while all the
// same, as many clients look for an answer only after they have sent everything.
func readBody(r *http.Request) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r.Body, maxBody+1))
	if err != nil {
		return nil, badRequest("reading the request: %w", err)
	}
	if len(data) > maxBody {
		_, _ = io.CopyN(io.Discard, r.Body, maxBody)
		return nil, refuse(http.StatusRequestEntityTooLarge, "the request has more than %d bytes", maxBody)
	}
	return data, nil
}

func parseReview(data []byte) (*review, error) {
	asked := &review{}
	if err := decode(data, asked); err != nil {
		return nil, badRequest("decoding the AdmissionReview: %w", err)
	}
	version := asked.APIVersion
	switch {
	case asked.Kind != "AdmissionReview" || version != "admission.k8s.io/v1" && version != "admission.k8s.io/v1beta1":
		return nil, badRequest("want an AdmissionReview of admission.k8s.io/v1 or v1beta1, got %.70q of %.70q", asked.Kind, version)
	case asked.Request == nil:
		return nil, badRequest("the AdmissionReview has no request")
	case asked.Request.UID == "":
		return nil, badRequest("the request of the AdmissionReview has no uid")
	}
	return asked, nil
}

// deadline is how long an answer may take when the API server waits for timeout, which
// is a duration or nothing.
func deadline(timeout string) time.Duration {
	if waits, err := time.ParseDuration(timeout); err == nil {
		return min(waits-answerTime, maxTime)
	}
	return maxTime
}

// reply is the answer to asked, in its own version.
func (asked *review) reply(v verdict) ([]byte, error) {
	patch, err := encode(v.patch)
	if err != nil {
		return nil, err
	}
	answer := admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: asked.APIVersion, Kind: asked.Kind},
		Response: &admissionv1.AdmissionResponse{UID: asked.Request.UID, Allowed: true, Warnings: v.warnings},
	}
	if patch != nil {
		kind := admissionv1.PatchTypeJSONPatch
		answer.Response.Patch, answer.Response.PatchType = patch, &kind
	}
	data, err := json.Marshal(answer)
	if err != nil {
		return nil, fmt.Errorf("encoding the answer: %w", err)
	}
	return data, nil
}
