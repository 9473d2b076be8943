// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// TestOldRead: the responses to the first reads of PersistentVolumes and VolumeSnapshotContents that are being deleted arrive late.
// Nothing is deleted before another read.
func TestOldRead(t *testing.T) {
	var s *simulation
	late := map[string]int{}
	synctest.Test(t, func(*testing.T) {
		s = newSimulation(&choices{})
		s.setUp(scale{
			replicas: 1, nodes: 2, claims: 2, protection: "always", features: cluster.Features{Snapshots: true},
		})
		s.prepare()
		for _, group := range s.cluster.UserSteps(s.scale.claims) {
			for _, step := range group {
				if strings.HasPrefix(step.Name, "user creates snapshot") {
					s.perform(step)
				}
			}
		}
		s.rest("with snapshots")
		s.tearDown()
		for range 400 {
			s.nextStep()
			s.check()
			s.delayReads(late)
		}
		s.rest("after users have deleted everything")
		s.end()
	})
	if s.history.Violation != "" || late["persistentvolumes"] == 0 || late["volumesnapshotcontents"] == 0 {
		t.Errorf("%s; late responses: %v\n%s", s.history.Violation, late, strings.Join(s.history.Lines, "\n"))
	}
}

// delayReads continues the oldest operation, and counts in late the responses that it delays: the first two of each resource.
func (s *simulation) delayReads(late map[string]int) {
	pending, possible := s.gate.begin(s.step), s.cluster.Steps()
	switch {
	case len(pending) > 0:
		o, v := pending[0], verdict{}
		for _, resource := range []string{"persistentvolumes", "volumesnapshotcontents"} {
			read := "get " + resource + " "
			switch {
			case o.kind == request && strings.HasPrefix(o.name, read) && late[resource] < 2:
				late[resource]++
				v.delay = true
			case o.kind == response && strings.HasPrefix(o.name, "response to "+read):
				time.Sleep(maxReadAge + time.Second)
			}
		}
		s.record("%s %s %s", o.replica.client, o.name, fmt.Sprint(v.delay))
		s.gate.proceed(o, v)
	case len(possible) > 0:
		s.perform(possible[0])
	default:
		s.advance(idle)
	}
}
