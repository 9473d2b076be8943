// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"testing"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// TestUnansweredCallIsNotForgottenForACache: the cache lacks the content before the handler of its deletion runs, which decides
// about the call. There is no driver and no API server: every use of them panics.
func TestUnansweredCallIsNotForgottenForACache(t *testing.T) {
	s := testState(released, set(AnnBeingCreated, AnnRequest), withCall(intent.Unknown))
	contents, _ := kube.NewInformer[*content](kube.Source[runtime.Object]{
		Object: &snapshotv1.VolumeSnapshotContent{}, Indexers: indexers(),
	})
	events := &events{}
	l := &loop{
		c: &Controller{deps: Deps{Events: events}}, kind: snapshotKind, watches: &watches{contents: contents},
		objects: kube.NewTermCache(contents), ledger: intent.NewLedger[types.UID, memory](nil),
	}
	l.queue = workloop.New(workloop.Config{}, workloop.NewMetrics(prometheus.NewRegistry()), l.sync)
	call := intent.Change[memory]{Event: intent.Resume, Args: recordedArgs, Set: func(m *memory) { m.undoable = true }}
	if _, _, err := l.ledger.Apply(s.content.UID, call); err != nil {
		t.Fatal(err)
	}
	request, _ := s.content.recordedRequest()
	if err := l.create(t.Context(), s, step{request: request}); err != nil {
		t.Error(err)
	}
	l.deleted(s.content)
	if e := l.ledger.Get(s.content.UID); e.State != intent.Unknown || e.Payload.orphan == nil {
		t.Errorf("the call is not undone: %+v, events %q", e, events.all())
	}
}
