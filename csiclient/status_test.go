// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

func TestStatus(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, _ := newClient(t, p, nil)
	if s := c.Status(); s.NotReady == "" || s.Address != p.Address() {
		t.Errorf("before the connection: %+v", s)
	}
	connect(t, c)
	p.Next("DeleteVolume", csitest.Fail(codes.Internal, strings.Repeat("x", 10000)), csitest.Hang())
	request := &csi.DeleteVolumeRequest{VolumeId: "v-1", Secrets: map[string]string{"key": "hidden"}}
	if _, err := c.Controller().DeleteVolume(within(t), request); err == nil {
		t.Fatal("no error")
	}
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = c.Controller().DeleteVolume(within(t), request) })
	if err := p.Wait(within(t), "DeleteVolume", 2); err != nil {
		t.Fatal(err)
	}
	s := c.Status()
	if s.NotReady != "" || s.Driver.Name != p.Name() {
		t.Errorf("got %+v", s)
	}
	if len(s.Running) != 1 || s.Running[0].Method != "DeleteVolume" || s.Running[0].Volume != "v-1" || s.Running[0].Code != "" {
		t.Errorf("running: %+v", s.Running)
	}
	if len(s.Failed) != 1 || s.Failed[0].Code != "Internal" || len(s.Failed[0].Error) > maxText+5 || s.Failed[0].Took <= 0 {
		t.Errorf("failed: %+v", s.Failed)
	}
	p.Release()
	wg.Wait()
	s = c.Status()
	if len(s.Running) != 0 || len(s.Slowest) == 0 {
		t.Errorf("afterwards: %+v", s)
	}
	for i := 1; i < len(s.Slowest); i++ {
		if s.Slowest[i].Took > s.Slowest[i-1].Took {
			t.Errorf("not in order: %+v", s.Slowest)
		}
	}
}
