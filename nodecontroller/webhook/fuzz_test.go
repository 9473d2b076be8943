// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// assumed returns a source in which all claims of pod count, but for some names.
func assumed(pod *rawPod) *facts {
	from := &facts{
		claims:  map[string]*corev1.PersistentVolumeClaim{},
		devices: map[string]string{"ours": "dc1", "second": "dc2", "bad": "a/b"}, standard: ptr.To("ours"),
	}
	for _, name := range pod.claimNames() {
		class := "ours"
		switch name[0] {
		case 'b':
			class = "second"
		case 'c':
			class = "theirs"
		}
		from.claims[name] = pvc(&class, "1Gi")
	}
	return from
}

var seeds = []string{
	`{}`, `null`, `[]`, `1`,
	`{"metadata":null,"spec":{"containers":[{"resources":null}],"volumes":[{"persistentVolumeClaim":{"claimName":"a"}}]}}`,
	rawPodWith([]string{"a", "b", "c", "a"}, `{}`, `{"storageClassName":"second","resources":{"requests":{"storage":"3Ki"}}}`),
	`{"metadata":{"annotations":{"capacity.topolvm.io/dc1":"1","capacity.topolvm.io/x~y/z":"2","q":""},"n":[1]},"spec":{"containers":[{"resources":{"limits":{"topolvm.io/capacity":"2","x":1},"requests":{}}},{}],"volumes":[{"persistentVolumeClaim":{"claimName":"a"}}],"x":{"y":1e400}},"status":null}`,
	`{"spec":{"containers":[{"resources":{"requests":{"topolvm.io/capacity":"1"}}}],"volumes":[{"ephemeral":{"volumeClaimTemplate":{"spec":{"storageClassName":"ours","resources":{"requests":{"storage":1e3}}}}}}]}}`,
	`{"spec":{"containers":[{}],"volumes":[{"ephemeral":{"volumeClaimTemplate":{"spec":{"storageClassName":"bad"}}}}]}}`,
}

// FuzzPatch: the patch applies to the very object it was made for, changes nothing but
// what it is for, and leaves nothing to change.
func FuzzPatch(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		cfg := testConfig("d")
		pod := &rawPod{}
		if decode(raw, pod) != nil {
			return
		}
		_, v, err := cfg.decide(pod, assumed(pod))
		if err != nil || len(v.patch) == 0 {
			return
		}
		patch, err := json.Marshal(v.patch)
		if err != nil {
			t.Fatal(err)
		}
		out := apply(t, raw, patch)
		var before, after any
		if err := unmarshal(raw, &before); err != nil {
			t.Fatal(err)
		}
		if err := unmarshal(out, &after); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(others(before), others(after)); diff != "" {
			t.Errorf("%s\nchanges %s\nby %s", patch, raw, diff)
		}
		again := &rawPod{}
		if err := decode(out, again); err != nil {
			t.Fatal(err)
		}
		if _, v, err := cfg.decide(again, assumed(again)); err != nil || len(v.patch) > 0 {
			t.Errorf("%s\nis changed again: %v %v", out, v, err)
		}
	})
}

func unmarshal(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber() // of which a patch must not change the digits
	return d.Decode(v)
}

// others returns object without what the patch is for.
func others(object any) any {
	at := func(parent any, key string) map[string]any {
		m, _ := parent.(map[string]any)
		child, _ := m[key].(map[string]any)
		return child
	}
	without := func(parent any, key string) {
		if m, ok := parent.(map[string]any); ok && len(at(m, key)) == 0 {
			delete(m, key) // absent, null and empty are the same
		}
	}
	annotations := at(at(object, "metadata"), "annotations")
	for k := range annotations {
		if k == "capacity.topolvm.io/dc1" || k == "capacity.topolvm.io/dc2" {
			delete(annotations, k)
		}
	}
	without(at(object, "metadata"), "annotations")
	without(object, "metadata")
	spec := at(object, "spec")
	if containers, _ := spec["containers"].([]any); len(containers) > 0 {
		for _, kind := range []string{"limits", "requests"} {
			resources := at(containers[0], "resources")
			delete(at(resources, kind), "topolvm.io/capacity")
			without(any(resources), kind)
		}
		without(containers[0], "resources")
	}
	return object
}

// FuzzReview: whatever is sent, the answer is a refusal or an AdmissionReview that allows.
func FuzzReview(f *testing.F) {
	s := &Server{cfg: testConfig("d"), bodies: semaphore.NewWeighted(maxBodies), metrics: newMetrics(prometheus.NewRegistry())}
	s.mutations = map[string]mutation{
		"/pod/mutate": {"pods", func(_ context.Context, r *request) (verdict, error) {
			pod := &rawPod{}
			if err := decode(r.Object.Raw, pod); err != nil {
				return verdict{}, badRequest("%w", err)
			}
			_, v, err := s.cfg.decide(pod, assumed(pod))
			if err != nil {
				err = badRequest("%w", err)
			}
			return v, err
		}},
		"/pvc/mutate": {"persistentvolumeclaims", func(_ context.Context, r *request) (verdict, error) {
			claim := &rawClaim{}
			if err := decode(r.Object.Raw, claim); err != nil {
				return verdict{}, badRequest("%w", err)
			}
			return verdict{patch: finalizerPatch(claim.Metadata, "x/y")}, nil
		}},
	}
	for _, seed := range seeds {
		for _, resource := range []string{"pods", "persistentvolumeclaims"} {
			f.Add(reviewOf(f, "n", resource, json.RawMessage(seed)), resource == "pods")
		}
		f.Add([]byte(seed), true)
	}
	f.Add([]byte(strings.Repeat("[", 20000)), true)
	f.Add([]byte(strings.Repeat(`{"request":`, 20000)), true)
	f.Fuzz(func(t *testing.T, body []byte, pods bool) {
		path := "/pvc/mutate"
		if pods {
			path = "/pod/mutate"
		}
		r := httptest.NewRequest(http.MethodPost, path, bytes.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		switch w.Code {
		case http.StatusBadRequest:
			return
		case http.StatusOK:
		default:
			t.Fatalf("%d %s", w.Code, w.Body)
		}
		answer := admissionv1.AdmissionReview{}
		if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil {
			t.Fatalf("%s: %v", w.Body, err)
		}
		a := answer.Response
		if a == nil || !a.Allowed || a.UID == "" || (a.Patch == nil) != (a.PatchType == nil) || answer.Kind != "AdmissionReview" {
			t.Errorf("%s", w.Body)
		}
	})
}
