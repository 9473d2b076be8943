// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/lru"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestEventsAreSentAtShutdown: events that are queued when the services stop are sent before the process exits.
func TestEventsAreSentAtShutdown(t *testing.T) {
	cp := kubetest.Get(t)
	ns := kubetest.Namespace(t, cp)
	sending, stopped := make(chan struct{}, 100), make(chan struct{})
	config := kubetest.Proxy(t, cp.Config(), func(w http.ResponseWriter, r *http.Request, pass http.Handler) {
		if r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/events") {
			sending <- struct{}{}
			<-stopped // the first event is in flight, the second one is queued
		}
		pass.ServeHTTP(w, r)
	})
	services, stopServices := context.WithCancel(t.Context())
	events, err := startEvents(services, config, "test", "drv")
	if err != nil {
		t.Fatal(err)
	}
	object := &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: ns, Name: "c"}
	events.Event(object, corev1.EventTypeNormal, "First", "in flight")
	events.Event(object, corev1.EventTypeNormal, "Second", "queued")
	<-sending
	stopServices()
	close(stopped)
	events.stop(time.Minute)
	list, err := cp.Client().CoreV1().Events(ns).List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 2 {
		t.Errorf("%d events are there, want 2 (%v)", len(list.Items), err)
	}
}

// TestEventsDoNotDelayTheShutdown: an API server that does not answer delays the end by no more than the grace.
func TestEventsDoNotDelayTheShutdown(t *testing.T) {
	cp := kubetest.Get(t)
	sending, release := make(chan struct{}, 100), make(chan struct{})
	config := kubetest.Proxy(t, cp.Config(), func(http.ResponseWriter, *http.Request, http.Handler) {
		sending <- struct{}{}
		<-release
	})
	defer close(release) // before the proxy waits for its requests
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events, err := startEvents(ctx, config, "test", "drv")
	if err != nil {
		t.Fatal(err)
	}
	events.Event(&corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: "default", Name: "c"}, corev1.EventTypeNormal, "First",
		"hangs")
	<-sending
	done := make(chan struct{})
	go func() { events.stop(eventsGrace); close(done) }()
	kubetest.Eventually(t, "it stops", func(context.Context) error {
		select {
		case <-done:
			return nil
		default:
			return fmt.Errorf("it still waits")
		}
	})
}

// TestRepeatedEventsHideNoOthers: an event that is sent more often than the limit for similar events does not keep another one
// about the same object from being sent.
func TestRepeatedEventsHideNoOthers(t *testing.T) {
	cp := kubetest.Get(t)
	ns := kubetest.Namespace(t, cp)
	events, err := startEvents(t.Context(), cp.Config(), "test", "drv")
	if err != nil {
		t.Fatal(err)
	}
	object := &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: ns, Name: "c"}
	for range 40 {
		events.Event(object, corev1.EventTypeWarning, "Repeated", "again")
	}
	events.Event(object, corev1.EventTypeWarning, "Other", "once")
	events.stop(time.Minute)
	list, err := cp.Client().CoreV1().Events(ns).List(t.Context(), metav1.ListOptions{FieldSelector: "reason=Other"})
	if err != nil || len(list.Items) != 1 {
		t.Errorf("%d events are there, want 1 (%v)", len(list.Items), err)
	}
}

// countingSink counts the events that reach it.
type countingSink map[string]int

func (s countingSink) Create(event *corev1.Event) (*corev1.Event, error) { return s.count(event) }
func (s countingSink) Update(event *corev1.Event) (*corev1.Event, error) { return s.count(event) }
func (s countingSink) Patch(event *corev1.Event, _ []byte) (*corev1.Event, error) {
	return s.count(event)
}

func (s countingSink) count(event *corev1.Event) (*corev1.Event, error) {
	s[event.InvolvedObject.Namespace+" "+event.Type]++
	return event, nil
}

// TestWarningsOfANamespaceAreLimited: a namespace whose claims fail cannot take the events of others.
func TestWarningsOfANamespaceAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sent := countingSink{}
		var sink record.EventSink = limitedSink{sent, klog.Background(), lru.New(maxNamespaces)}
		send := func(namespace, kind string) {
			event := &corev1.Event{Type: kind, InvolvedObject: corev1.ObjectReference{Namespace: namespace}}
			_, err := sink.Create(event)
			if _, patched := sink.Patch(event, nil); err != nil || patched != nil {
				t.Fatal("a dropped event has an error, and would be sent again")
			}
		}
		for range 10 * warningBurst {
			send("many", corev1.EventTypeWarning)
			send("many", corev1.EventTypeNormal)
		}
		send("other", corev1.EventTypeWarning)
		send("", corev1.EventTypeWarning)
		want := fmt.Sprint(countingSink{"many Warning": warningBurst, "many Normal": 20 * warningBurst, "other Warning": 2, " Warning": 2})
		if got := fmt.Sprint(sent); got != want {
			t.Errorf("sent %s, want %s", got, want)
		}
		time.Sleep(time.Second)
		for range warningBurst {
			send("many", corev1.EventTypeWarning)
		}
		if got := sent["many Warning"]; got != warningBurst+warningsPerSecond {
			t.Errorf("after a second, %d warnings were sent", got)
		}
	})
}
