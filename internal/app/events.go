// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/lru"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// eventsGrace bounds the sending of queued events at shutdown.
const eventsGrace = 2 * time.Second

// reasonLast is the reason of an event that is never sent: it marks the end of the queue.
const reasonLast = "Last"

// eventSender sends events about objects. Its client has no rate limit, and takes nothing from the rate limits of the
// roles.
type eventSender struct {
	record.EventRecorder // with the source that csi-provisioner has
	broadcaster          record.EventBroadcaster
	// stop sends the queued events, for no longer than grace, and stops.
	stop func(grace time.Duration)
}

// recorder returns a recorder for events from component.
func (s eventSender) recorder(component string) record.EventRecorder {
	return s.broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component})
}

// startEvents starts sending events.
func startEvents(ctx context.Context, config *rest.Config, version, driver string) (eventSender, error) {
	client, err := typedcorev1.NewForConfig(kube.ForRole(config, version, "events", 0, 0))
	if err != nil {
		return eventSender{}, fmt.Errorf("creating the client for events: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		return eventSender{}, fmt.Errorf("reading the host name: %w", err)
	}
	// Events of work that completes during shutdown are sent, too.
	broadcaster := record.NewBroadcaster(record.WithContext(context.WithoutCancel(ctx)),
		record.WithCorrelatorOptions(record.CorrelatorOptions{SpamKeyFunc: spamKey}))
	drained := make(chan struct{})
	sink := limitedSink{&typedcorev1.EventSinkImpl{Interface: client.Events("")}, klog.FromContext(ctx), lru.New(maxNamespaces)}
	broadcaster.StartRecordingToSink(drainingSink{sink, drained})
	source := corev1.EventSource{Component: fmt.Sprintf("%s_%s_%s", driver, host, uuid.NewString())}
	recorder := broadcaster.NewRecorder(scheme.Scheme, source)
	stop := func(grace time.Duration) {
		recorder.Event(&corev1.ObjectReference{Kind: "Event", Name: reasonLast}, corev1.EventTypeNormal, reasonLast, reasonLast)
		select {
		case <-drained:
		case <-time.After(grace):
		}
		broadcaster.Shutdown()
	}
	return eventSender{recorder, broadcaster, stop}, nil
}

// spamKey returns the key of the limit for similar events: 25, and one more in five minutes. The limit of client-go is for all
// events of a type about an object, so that a call that fails repeatedly would hide the events of other roles.
func spamKey(event *corev1.Event) string {
	return strings.Join([]string{string(event.InvolvedObject.UID), event.InvolvedObject.Kind, event.InvolvedObject.Namespace,
		event.InvolvedObject.Name, event.Type, event.Reason}, "/")
}

// drainingSink closes drained when the event with [reasonLast] is reached: events are sent one after the other.
type drainingSink struct {
	record.EventSink
	drained chan struct{}
}

func (s drainingSink) Create(event *corev1.Event) (*corev1.Event, error) {
	if event.Reason == reasonLast {
		close(s.drained)
		return event, nil
	}
	return s.EventSink.Create(event)
}

// A namespace has a limit of warnings per second, after a burst: its users decide how many of its objects fail. Without the
// limit, the queue of events, which the namespaces share, would drop the events of others.
const (
	warningsPerSecond = 10
	warningBurst      = 200
	// maxNamespaces bounds the namespaces whose warnings are counted. The one that had none for the longest time is forgotten.
	maxNamespaces = 1000
)

// limitedSink drops the warnings of a namespace above its limit. It is used by one goroutine.
type limitedSink struct {
	record.EventSink
	log        klog.Logger
	namespaces *lru.Cache // from namespace to *namespaceLimit
}

// namespaceLimit is the limit of one namespace.
type namespaceLimit struct {
	*rate.Limiter
	reported bool // the log has a line about it
}

// Create creates event. An event that is dropped has no error: it would be sent again.
func (s limitedSink) Create(event *corev1.Event) (*corev1.Event, error) {
	if s.drops(event) {
		return event, nil
	}
	return s.EventSink.Create(event)
}

// Patch patches event.
func (s limitedSink) Patch(event *corev1.Event, data []byte) (*corev1.Event, error) {
	if s.drops(event) {
		return event, nil
	}
	return s.EventSink.Patch(event, data)
}

// drops reports whether event exceeds the limit of its namespace.
func (s limitedSink) drops(event *corev1.Event) bool {
	namespace := event.InvolvedObject.Namespace
	if namespace == "" || event.Type != corev1.EventTypeWarning {
		return false
	}
	limit := &namespaceLimit{Limiter: rate.NewLimiter(warningsPerSecond, warningBurst)}
	if known, ok := s.namespaces.Get(namespace); ok {
		limit = known.(*namespaceLimit)
	} else {
		s.namespaces.Add(namespace, limit)
	}
	if limit.Allow() {
		return false
	}
	if !limit.reported {
		limit.reported = true
		s.log.Info("Warning events of a namespace exceed their limit and are dropped; the log has each failure", "namespace", namespace,
			"perSecond", warningsPerSecond, "burst", warningBurst)
	}
	return true
}
