// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/typed/volumesnapshot/v1"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

var testSnapshot = volumerules.Source{Kind: kube.KindSnapshot, Namespace: "ns", Name: "s"}

// hangTime is how long a [webhook] delays a patch.
const hangTime = 10 * time.Second

// webhook is an API server with one VolumeSnapshot, whose patches hang in an admission webhook before patched answers them.
type webhook struct {
	patched func(w io.Writer) (code int)

	mu       sync.Mutex
	requests map[string]int // by method
}

const snapshotText = `{"apiVersion":"snapshot.storage.k8s.io/v1","kind":"VolumeSnapshot",` +
	`"metadata":{"namespace":"ns","name":"s","uid":"u","resourceVersion":"1"}}`

func (h *webhook) RoundTrip(r *http.Request) (*http.Response, error) {
	h.mu.Lock()
	h.requests[r.Method]++
	h.mu.Unlock()
	code, text := http.StatusOK, &strings.Builder{}
	if r.Method == http.MethodGet {
		text.WriteString(snapshotText)
	} else {
		time.Sleep(hangTime)
		code = h.patched(text)
	}
	return &http.Response{
		StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(text.String())),
		Request: r,
	}, nil
}

func anyClass(string) bool { return true }

// loop returns a loop that restores from h.
func (h *webhook) loop(t *testing.T) *claimLoop {
	t.Helper()
	h.requests = map[string]int{}
	snapshots, err := snapshotclient.NewForConfig(&rest.Config{Host: "http://api", Transport: h, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	c := &Controller{
		deps:    Deps{Snapshots: snapshots, Events: record.NewFakeRecorder(100)},
		metrics: newMetrics(prometheus.NewRegistry(), anyClass, func() (float64, float64) { return 0, 0 }),
		cfg:     Config{RetryIntervalStart: time.Second},
	}
	ops := newOperations()
	if _, _, err := ops.Apply(claimKey{UID: "other"}, begin(intent.Plan, "a", operation{source: &testSnapshot})); err != nil {
		t.Fatal(err)
	}
	claims := kube.NewTermCache(kube.NewInformers(nil, nil, "d").Claims())
	p := &sourceProtector{c: c, claims: claims, ops: ops}
	beginsAt(t, claims, "1")
	return &claimLoop{c: c, sources: p}
}

// beginsAt has the term begin at a resourceVersion.
func beginsAt(t *testing.T, claims *kube.TermCache[*corev1.PersistentVolumeClaim], version string) {
	t.Helper()
	list := func(context.Context, metav1.ListOptions) (*corev1.PersistentVolumeClaimList, error) {
		return &corev1.PersistentVolumeClaimList{ListMeta: metav1.ListMeta{ResourceVersion: version}}, nil
	}
	if err := kube.BeginTerm(t.Context(), claims, list); err != nil {
		t.Fatal(err)
	}
}

// protectSnapshot protects the snapshot for a claim.
func (l *claimLoop) protectSnapshot(ctx context.Context) (change, error) {
	r := reads{refs: &resolvedRefs{object: &snapshotv1.VolumeSnapshot{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s", UID: "u"}}}}
	defer r.release()
	next := step{trigger: intent.Plan, next: operation{source: &testSnapshot}}
	return l.takeUp(ctx, claimState{claim: testClaim(nil), reads: r}, next, &r)
}

// TestClonesShareTheProtectionOfTheirSource: when the PATCH of a source hangs, the workers of its clones wait for one request
// together, not for one request each, one after the other.
func TestClonesShareTheProtectionOfTheirSource(t *testing.T) {
	const clones = 5
	for name, patched := range map[string]func(io.Writer) int{
		"succeeds": func(w io.Writer) int {
			_, _ = io.WriteString(w, strings.Replace(snapshotText, `"uid"`, `"finalizers":["`+kube.SnapshotProtection+`"],"uid"`, 1))
			return http.StatusOK
		},
		"fails": func(io.Writer) int { return http.StatusInternalServerError },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := &webhook{patched: patched}
				a := h.loop(t)
				begin := time.Now()
				var wg sync.WaitGroup
				for range clones {
					wg.Go(func() {
						if _, err := a.protectSnapshot(t.Context()); (err == nil) != (name == "succeeds") {
							t.Errorf("got the error %v", err)
						}
					})
				}
				wg.Wait()
				if took := time.Since(begin); took != hangTime {
					t.Errorf("%d clones took %v, want %v", clones, took, hangTime)
				}
				if got := fmt.Sprint(h.requests); got != "map[PATCH:1]" {
					t.Errorf("the requests are %v, want one PATCH", got)
				}
			})
		})
	}
}

// TestPanicOfASharedRequest: a panic of the request that the workers of several claims share is a panic of each worker, which
// recovers from it, and locks out no other claim.
func TestPanicOfASharedRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &webhook{patched: func(io.Writer) int { panic("in a request") }}
		a := h.loop(t)
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				defer func() {
					if recover() == nil {
						t.Error("no panic")
					}
				}()
				_, _ = a.protectSnapshot(t.Context())
			})
		}
		wg.Wait()
		if _, ok := a.sources.locks.TryExclusive(testSnapshot); !ok || h.requests[http.MethodPatch] != 1 {
			t.Errorf("the source is locked: %t; requests: %v", !ok, h.requests)
		}
	})
}

// TestProtectionEndsWithTheTerm: at the end of the term a worker does not wait for the one that removes the finalizer, and the
// end is no failure of the claim.
func TestProtectionEndsWithTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := (&webhook{}).loop(t)
		if _, ok := a.sources.locks.TryExclusive(testSnapshot); !ok {
			t.Fatal("the source is locked")
		}
		ended := errors.New("the term has ended")
		ctx, end := context.WithCancelCause(t.Context())
		end(ended)
		events := record.NewFakeRecorder(1)
		a.c.deps.Events = events
		if result, err := a.protectSnapshot(ctx); !errors.Is(err, ended) || result.Event != 0 || len(events.Events) > 0 {
			t.Errorf("got event %q, error %v and %d events", result.Event, err, len(events.Events))
		}
	})
}

// TestReleaseOfALockedSource: a worker that would remove the finalizer does not wait for the workers that add it.
func TestReleaseOfALockedSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := (&webhook{patched: func(io.Writer) int { return http.StatusInternalServerError }}).loop(t)
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = a.protectSnapshot(t.Context()) })
		synctest.Wait()
		begin := time.Now()
		next, err := a.sources.sync(t.Context(), testSnapshot)
		if took := time.Since(begin); err != error(workloop.Waiting{}) || took > 0 || next != begin.Add(time.Second) {
			t.Errorf("got %v, %v after %v, want another try after 1s", next, err, took)
		}
		wg.Wait()
		if next, err := a.sources.sync(t.Context(), testSnapshot); err != nil || !next.IsZero() { // it is in use
			t.Errorf("got %v, %v after the lock was released", next, err)
		}
	})
}

// TestUpdatedSource: with distributed provisioning, an instance leaves a finalizer that the one of another node may have just added.
func TestUpdatedSource(t *testing.T) {
	source := metav1.ObjectMeta{Namespace: "ns", Name: "s", Finalizers: []string{kube.SnapshotProtection, kube.CloningProtection}}
	for _, tt := range []struct {
		distributed, added bool
		want               int
	}{{false, false, 1}, {false, true, 1}, {true, false, 0}, {true, true, 1}} {
		cfg := Config{NodeDeployment: tt.distributed, SnapshotOrphanSweepInterval: time.Hour}
		c := &Controller{cfg: cfg, deps: Deps{Queues: workloop.NewMetrics(prometheus.NewRegistry())}}
		c.driver.caps.CreateDeleteSnapshot = true
		p := newSourceProtector(c, nil, nil, newOperations())
		defer p.stop()
		p.snapshotChanged(&metav1.PartialObjectMetadata{ObjectMeta: source}, tt.added)
		p.claimChanged(&corev1.PersistentVolumeClaim{ObjectMeta: source}, tt.added)
		if got, clones := p.snapshotQueue.Len(), p.cloneQueue.Len(); got != tt.want || clones != tt.want {
			t.Errorf("%+v: %d snapshots and %d claims are enqueued", tt, got, clones)
		}
	}
}
