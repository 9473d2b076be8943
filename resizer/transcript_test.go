// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/looptest"
)

// story is a transcript of the claim c1 and its PersistentVolume pv-c1.
type story struct {
	*fixture
	*looptest.Transcript
}

func newStory(t *testing.T, plugin csitest.Config, text string) *story {
	s := &story{fixture: newFixture(t, plugin, func(c *Config) {
		c.Timeout, c.RetryIntervalStart, c.RetryIntervalMax = time.Second, 50*time.Millisecond, time.Hour
	})}
	s.fixture.classes()
	s.Transcript = s.Record(text)
	s.create("c1", nil)
	s.begin()
	return s
}

// begin starts the resizer with the transcript.
func (s *story) begin() {
	s.Helper()
	s.Start(func(p looptest.Process) (_ looptest.Loop, err error) {
		p.Informers.Retain(kube.RetainedFields{Resize: true})
		s.c, err = New(s.cfg, Deps{
			Driver: p.Driver, Client: p.Client, Metadata: p.Metadata, Informers: p.Informers, CSI: p.CSI.Controller(),
			Ready:  p.CSI.WaitReady,
			Events: s.Transcript, Registry: p.Registry, Queues: p.Queues,
		})
		return s.c, err
	})
}

func TestTranscripts(t *testing.T) {
	const finished = "C=1Gi A=2Gi " + pending + " P=2Gi PRE=1Gi " + waitNode
	t.Run("expand", func(t *testing.T) {
		s := newStory(t, expands, "The claim records the size before the call, and the PersistentVolume is written before the\nclaim. "+
			"After the node has finished, the size before the expansion is removed.")
		s.Step("The claim requests 2Gi.")
		s.request("c1", "2Gi")
		s.reaches("c1", finished)
		s.Says("FileSystemResizeRequired")
		s.Step("The kubelet expands the file system.")
		s.nodeExpands("c1")
		s.reaches("c1", "C=2Gi A=2Gi P=2Gi")
		s.Golden("expand")
	})
	t.Run("recover_with_a_smaller_request", func(t *testing.T) {
		s := newStory(t, expands, "A call that exceeds --timeout is indeterminate: its size is requested again although the\nclaim "+
			"requests less now. The final error permits the smaller size.")
		s.Plugin.Next(expandMethod, csitest.Hang(), csitest.Fail(codes.ResourceExhausted, "full"))
		s.Step("The claim requests 9Gi, and during the call 2Gi.")
		s.request("c1", "9Gi")
		s.Wait(expandMethod, 1)
		s.request("c1", "2Gi")
		s.reaches("c1", finished)
		s.Golden("recover_with_a_smaller_request")
	})
	t.Run("crash_between_call_and_result", func(t *testing.T) {
		s := newStory(t, expands, "The process exits after the driver has expanded the volume. The next leader reads the claim\nand "+
			"repeats the call with equal arguments.")
		s.Plugin.Next(expandMethod, csitest.DoAndHang())
		s.Step("The claim requests 2Gi.")
		s.request("c1", "2Gi")
		s.Wait(expandMethod, 1)
		s.Crash()
		s.Must(s.Plugin.WaitIdle(t.Context()))
		s.Step("Another replica acquires the Lease.")
		s.begin()
		s.reaches("c1", finished)
		s.Golden("crash_between_call_and_result")
	})
	t.Run("node_only", func(t *testing.T) {
		s := newStory(t, nodeOnly, "A driver that expands volumes on nodes only gets no call. The claim is written before the\n"+
			"PersistentVolume.")
		s.Step("The claim requests 2Gi.")
		s.request("c1", "2Gi")
		s.reaches("c1", finished)
		s.Golden("node_only")
	})
	t.Run("modify_and_roll_back", func(t *testing.T) {
		s := newStory(t, modifies, "The claim records the class before the call. After an infeasible response, the claim may\n"+
			"return to the previous class at once.")
		s.Step("The claim requests the VolumeAttributesClass bronze.")
		s.requestClass("c1", "bronze")
		s.reaches("c1", "C=1Gi K=bronze P=1Gi PV=bronze")
		s.Says("VolumeModifySuccessful")
		s.Step("The claim requests gold, which is infeasible.")
		s.Plugin.Next(modifyMethod, csitest.Fail(codes.InvalidArgument, "too many iops"))
		s.requestClass("c1", "gold")
		s.reaches("c1", "C=1Gi K=bronze M=Infeasible/gold P=1Gi PV=bronze ModifyVolumeError"+isModifying)
		s.Step("The claim requests bronze again.")
		s.requestClass("c1", "bronze")
		s.reaches("c1", "C=1Gi K=bronze P=1Gi PV=bronze")
		s.Golden("modify_and_roll_back")
	})
}
