// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// from is a claim with one of the two fields for its source.
func from(group *string, kind, name string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: group, Kind: kind, Name: name}
	}
}

func fromRef(group, namespace *string, kind, name string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: group, Namespace: namespace, Kind: kind, Name: name}
	}
}

func size(s string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(s)}
	}
}

// TestDecideCopy: a source is kept before its first copy is asked for, also by a process
// that takes over.
func TestDecideCopy(t *testing.T) {
	source := &volumerules.Source{Kind: kube.KindClaim, Namespace: "ns", Name: "c"}
	ofClaim := from(nil, "PersistentVolumeClaim", "c")
	copying := func(d *driver) { d.caps.CloneVolume = true }
	onNode := func(d *driver) { d.caps.CloneVolume, d.NodeDeployment, d.NodeName = true, true, "n" }
	tests := map[string]struct {
		driver func(*driver)
		claim  *corev1.PersistentVolumeClaim
		refs   *resolvedRefs
		begun  bool
		want   action
		reason string
	}{
		"not read yet": {copying, testClaim(ofClaim), nil, false, doReadReferences, "Wanted"},
		"not to be had": {
			copying, testClaim(ofClaim), &resolvedRefs{source: source, err: errors.New("no")}, false, doFail, "CannotRequest",
		},
		"read": {copying, testClaim(ofClaim), &resolvedRefs{source: source}, false, doBegin, "Wanted"},
		"recorded": {
			copying, testClaim(func(c *corev1.PersistentVolumeClaim) { ofClaim(c); protected(c) }), nil, false, doReadReferences,
			"RecordFound",
		},
		"recorded and read": {
			copying, testClaim(func(c *corev1.PersistentVolumeClaim) { ofClaim(c); protected(c) }), &resolvedRefs{source: source}, false,
			doBegin, "RecordFound",
		},
		"asked for":           {copying, testClaim(ofClaim), nil, true, doCreateVolume, "Planned"},
		"asked for on a node": {onNode, testClaim(ofClaim), nil, true, doProtect, "Planned"},
		"asked for, protection off": {
			func(d *driver) { onNode(d); d.ProvisioningProtection = ProtectionOff }, testClaim(ofClaim), nil, true, doCreateVolume,
			"Planned",
		},
		"asked for, being protected": {
			onNode, testClaim(func(c *corev1.PersistentVolumeClaim) { ofClaim(c); recorded(c) }), nil, true, doCreateVolume, "Planned",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := claimState{claim: tt.claim, class: testClass(nil), reads: reads{refs: tt.refs}, now: now}
			if tt.begun {
				s.call = testCall(intent.Planned, func(c *call) { c.Payload.source = source })
			}
			got := testDriver(tt.driver).decide(s)
			if got.action != tt.want || got.reason != tt.reason {
				t.Errorf("got %v because %s (%v), want %v because %s", got.action, got.reason, got.err, tt.want, tt.reason)
			}
			if got.action == doBegin && got.next.source != source {
				t.Errorf("operation %+v", got.next)
			}
		})
	}
}

func TestWaits(t *testing.T) {
	bound := func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "v" }
	for name, tt := range map[string]struct {
		claim *corev1.PersistentVolumeClaim
		want  bool
	}{
		"new":                       {testClaim(nil), true},
		"bound":                     {testClaim(bound), false},
		"bound and protected":       {testClaim(func(c *corev1.PersistentVolumeClaim) { bound(c); protected(c) }), true},
		"deleted":                   {testClaim(deleting), false},
		"deleted with a call about": {testClaim(func(c *corev1.PersistentVolumeClaim) { deleting(c); protected(c) }), true},
	} {
		if got := waits(tt.claim); got != tt.want {
			t.Errorf("%s: got %t", name, got)
		}
	}
}

// TestSourceUnlockedAfterPanic: a panic while a source is protected does not lock out the other
// claims of that source.
func TestSourceUnlockedAfterPanic(t *testing.T) {
	source := &volumerules.Source{Kind: kube.KindClaim, Namespace: "ns", Name: "c"}
	c := &Controller{} // every use of its nil client panics
	a := &claimLoop{c: c, sources: &sourceProtector{c: c}}
	func() {
		var r reads
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		defer r.release()
		_, _ = a.takeUp(t.Context(), claimState{reads: reads{refs: &resolvedRefs{}}}, step{next: operation{source: source}}, &r)
	}()
	if _, ok := a.sources.locks.TryExclusive(*source); !ok {
		t.Error("the source is still locked")
	}
}

// TestListOfClaimsHoldsNoLock: no worker waits for the request of another one.
func TestListOfClaimsHoldsNoLock(t *testing.T) {
	const workers = 2
	arrived := make(chan struct{}, workers)
	all := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		arrived <- struct{}{}
		<-all
		w.WriteHeader(http.StatusTeapot)
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	p := &sourceProtector{c: &Controller{deps: Deps{Client: client}}, claims: kube.NewTermCache(kube.NewInformers(nil, nil, "d").Claims())}
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			if _, err := p.knowsClaims(t.Context()); err == nil {
				t.Error("no error")
			}
		})
	}
	for i := range workers {
		select {
		case <-arrived:
		case <-time.After(time.Minute):
			t.Errorf("%d of %d requests have arrived", i, workers)
		}
	}
	close(all)
	wg.Wait()
}

// refuse answers a request with an error.
func refuse(w http.ResponseWriter, answer *apierrors.StatusError) {
	text := answer.ErrStatus
	text.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(text.Code))
	_ = json.NewEncoder(w).Encode(text)
}

// TestSecretOfRepeatedCall: only for a secret that does not exist are users advised to recreate it.
func TestSecretOfRepeatedCall(t *testing.T) {
	secret := schema.GroupResource{Resource: "secrets"}
	for _, answer := range []*apierrors.StatusError{apierrors.NewNotFound(secret, "s"), apierrors.NewInternalError(errUnusable)} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { refuse(w, answer) }))
		defer server.Close()
		client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
		if err != nil {
			t.Fatal(err)
		}
		noneUnresolved := func() (float64, float64) { return 0, 0 }
		a := &claimLoop{c: &Controller{
			deps:    Deps{Client: client, Events: record.NewFakeRecorder(1)},
			metrics: newMetrics(prometheus.NewRegistry(), anyClass, noneUnresolved),
		}}
		c := testCall(intent.Unknown, func(c *call) {
			c.Payload.plan.Secrets.Provisioner = &corev1.SecretReference{Namespace: "ns", Name: "s"}
		})
		_, err = a.readSecrets(t.Context(), c, &reads{})
		if got, want := strings.Contains(err.Error(), "Recreate the secret"), apierrors.IsNotFound(answer); got != want {
			t.Errorf("the error %q says that the secret must be recreated: %t, want %t", err, got, want)
		}
	}
}
