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
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

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
	sink := drainingSink{&typedcorev1.EventSinkImpl{Interface: client.Events("")}, make(chan struct{})}
	broadcaster.StartRecordingToSink(sink)
	source := corev1.EventSource{Component: fmt.Sprintf("%s_%s_%s", driver, host, uuid.NewString())}
	recorder := broadcaster.NewRecorder(scheme.Scheme, source)
	stop := func(grace time.Duration) {
		recorder.Event(&corev1.ObjectReference{Kind: "Event", Name: reasonLast}, corev1.EventTypeNormal, reasonLast, reasonLast)
		select {
		case <-sink.drained:
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
