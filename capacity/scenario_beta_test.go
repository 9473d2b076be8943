// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const (
	v1Path, v1Version     = "/apis/storage.k8s.io/v1", `"apiVersion":"storage.k8s.io/v1"`
	betaPath, betaVersion = "/apis/storage.k8s.io/v1beta1", `"apiVersion":"storage.k8s.io/v1beta1"`
	capacitiesResource    = "csistoragecapacities"
)

// oldServer is the API server as one of Kubernetes 1.23 would be: it has v1beta1 of
// CSIStorageCapacity, and not v1. written is how
// many writes of them there were.
func (f *fixture) oldServer(patchForbidden bool) (cfg *rest.Config, written *atomic.Int32) {
	f.Helper()
	written = &atomic.Int32{}
	cfg = kubetest.Proxy(f, f.ControlPlane.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		capacities := strings.Contains(r.URL.Path, "/"+capacitiesResource)
		switch {
		case r.URL.Path == betaPath:
			w.Header().Set("Content-Type", runtime.ContentTypeJSON)
			_ = json.NewEncoder(w).Encode(metav1.APIResourceList{
				TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: "storage.k8s.io/v1beta1",
				APIResources: []metav1.APIResource{{Name: capacitiesResource, Kind: "CSIStorageCapacity", Namespaced: true}},
			})
		case r.URL.Path == v1Path:
			r.Header.Del("Accept-Encoding")
			r.Header.Set("Accept", runtime.ContentTypeJSON)
			rewritten(w, r, pass, func(line []byte) []byte {
				var list metav1.APIResourceList
				if json.Unmarshal(line, &list) != nil {
					return line
				}
				list.APIResources = slices.DeleteFunc(
					list.APIResources, func(a metav1.APIResource) bool { return a.Name == capacitiesResource },
				)
				line, _ = json.Marshal(list)
				return line
			})
		case capacities && strings.HasPrefix(r.URL.Path, v1Path+"/"):
			http.NotFound(w, r)
		case capacities && patchForbidden && r.Method == http.MethodPatch:
			w.Header().Set("Content-Type", runtime.ContentTypeJSON)
			w.WriteHeader(http.StatusForbidden)
			_ = json.NewEncoder(w).Encode(metav1.Status{
				TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
				Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden,
			})
		case capacities:
			if r.Method != http.MethodGet {
				written.Add(1)
			}
			body, err := io.ReadAll(r.Body)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			body = bytes.ReplaceAll(body, []byte(betaVersion), []byte(v1Version))
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
			r.URL.Path = strings.Replace(r.URL.Path, betaPath, v1Path, 1)
			r.Header.Del("Accept-Encoding")
			rewritten(w, r, pass, func(line []byte) []byte { return bytes.ReplaceAll(line, []byte(v1Version), []byte(betaVersion)) })
		default:
			pass.ServeHTTP(w, r)
		}
	})
	cfg.ContentType = runtime.ContentTypeJSON
	return cfg, written
}

// rewritten passes r on and changes each line of the answer: what a watch sends, or all of it.
func rewritten(w http.ResponseWriter, r *http.Request, pass http.Handler, change func([]byte) []byte) {
	lines := &lineWriter{ResponseWriter: w, change: change}
	pass.ServeHTTP(lines, r)
	if len(lines.rest) > 0 {
		_, _ = w.Write(change(lines.rest))
	}
}

// lineWriter changes each line that is written.
type lineWriter struct {
	http.ResponseWriter
	change func([]byte) []byte
	rest   []byte // of a line whose end is still to come
}

func (w *lineWriter) WriteHeader(code int) {
	w.Header().Del("Content-Length")
	w.ResponseWriter.WriteHeader(code)
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		end := bytes.IndexByte(w.rest, '\n')
		if end < 0 {
			return len(p), nil
		}
		line := append(w.change(bytes.Clone(w.rest[:end])), '\n')
		w.rest = w.rest[end+1:]
		if _, err := w.ResponseWriter.Write(line); err != nil {
			return 0, err
		}
	}
}

// Unwrap lets the proxy flush what a watch sends.
func (w *lineWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// old has the controller work with a server that has v1beta1 only.
func (f *fixture) old(patchForbidden bool) (written *atomic.Int32) {
	f.Helper()
	cfg, written := f.oldServer(patchForbidden)
	client, err := kubernetes.NewForConfig(cfg)
	f.Must(err)
	beta, err := Beta(f.Context(), client.Discovery())
	f.Must(err)
	if !beta {
		f.Fatal("the API server is taken for one that has v1")
	}
	f.Watch = cfg
	f.change = func(d *Deps) { d.Client, d.Beta = client, beta }
	return written
}

func TestCapacityScenarioVersion(t *testing.T) {
	t.Run("062_only_v1beta1", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, func(c *Config) { c.PollInterval = 200 * time.Millisecond })
		written := f.old(false)
		set := f.statefulPod()
		owner, err := f.ownerBy(f.ControlPlane.Config(), "driver-0", 1)
		f.Must(err)
		beta := f.change
		f.change = func(d *Deps) { beta(d); d.Owner = owner }

		// What there is: one to adopt and correct, and an obsolete one.
		kept := f.existing("fast", "a", "7Gi", nil)
		f.existing("fast", "gone", "7Gi", nil)
		f.says("b", &csi.GetCapacityResponse{AvailableCapacity: 2 << 30, MaximumVolumeSize: wrapperspb.Int64(1 << 20)})
		f.makeFixture()
		f.start()
		for _, o := range f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi") {
			f.refers(o.OwnerReferences, "StatefulSet", set)
			if zone := o.NodeTopology.MatchLabels["t/zone"]; (o.MaximumVolumeSize != nil) != (zone == "b") ||
				(o.UID == kept.UID) != (zone == "a") {
				t.Errorf("in zone %s: %+v", zone, o)
			}
			if o.Labels[labelDriver] != f.Driver || o.Labels[labelManagedBy] != managedByBase {
				t.Errorf("labels %v", o.Labels)
			}
		}

		// An update, and no more writes than what changes.
		before := written.Load()
		f.has("b", 4<<30)
		b := f.published("fast t/zone=a 1Gi", "fast t/zone=b 4Gi")
		polled := f.Plugin.Count(getCapacity)
		f.Must(f.Plugin.Wait(t.Context(), getCapacity, polled+6))
		if n := written.Load() - before; n != 1 {
			t.Errorf("%d writes for one change", n)
		}
		for _, o := range b {
			if o.MaximumVolumeSize != nil {
				t.Errorf("maximumVolumeSize %v is still there", o.MaximumVolumeSize)
			}
		}

		// The watch works: a deleted object is created again, an obsolete one is deleted.
		f.Must(f.Client.StorageV1().CSIStorageCapacities(f.Namespace).Delete(t.Context(), kept.Name, metav1.DeleteOptions{}))
		kubetest.Eventually(t, "another object is there", func(context.Context) error {
			objects := f.objects()
			if len(objects) != 2 || slices.ContainsFunc(objects, func(o storagev1.CSIStorageCapacity) bool { return o.UID == kept.UID }) {
				return errors.New("there is none")
			}
			return nil
		})
		f.Must(f.Client.StorageV1().StorageClasses().Delete(t.Context(), f.Unique("fast"), metav1.DeleteOptions{}))
		f.published()
	})
	t.Run("062_only_v1beta1_without_patch", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, nil)
		f.old(true)
		kept := f.existing("fast", "a", "7Gi", nil)
		f.makeFixture()
		f.start()
		f.published("fast t/zone=a 1Gi", "fast t/zone=b 2Gi")
		f.still(kept)
	})
	t.Run("062_which_version", func(t *testing.T) {
		f := prepare(t, csitest.Config{}, nil)
		if beta, err := Beta(t.Context(), f.Client.Discovery()); err != nil || beta {
			t.Errorf("of this API server: %v, %v", beta, err)
		}
		ask := func(answer func(w http.ResponseWriter, r *http.Request, pass http.Handler)) (bool, error) {
			client, err := kubernetes.NewForConfig(kubetest.Proxy(t, f.ControlPlane.Config(), answer))
			f.Must(err)
			return Beta(t.Context(), client.Discovery())
		}
		if _, err := ask(
			func(w http.ResponseWriter, r *http.Request, _ http.Handler) { http.NotFound(w, r) },
		); !errors.Is(err, errNotServed) {
			t.Errorf("of one that has neither: %v", err)
		}
		var refused atomic.Int32
		if _, err := ask(func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			refused.Add(1)
			w.WriteHeader(http.StatusBadGateway)
		}); err == nil || refused.Load() != answers {
			t.Errorf("of one that fails: %v after %d requests", err, refused.Load())
		}
		var asked atomic.Int32
		beta, err := ask(func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
			switch asked.Add(1) {
			case 1: // v1
				http.NotFound(w, r)
			case 2: // v1beta1
				w.WriteHeader(http.StatusBadGateway)
			case 3, 4, 5, 6, 7, 8, 9:
				panic(http.ErrAbortHandler)
			default:
				pass.ServeHTTP(w, r)
			}
		})
		if err != nil || beta {
			t.Errorf("of one that is being updated: %v, %v", beta, err)
		}
	})
}
