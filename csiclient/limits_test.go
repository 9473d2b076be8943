// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"context"
	"runtime"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

func TestErrorTextsAreBounded(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, _ := newClient(t, p, nil)
	connect(t, c)
	for name, tt := range map[string]struct{ text, want string }{
		"short":              {"no space left", "no space left"},
		"lines":              {"first\n\tsecond\u2028third", "first  second third"},
		"control characters": {"\x1b[31mred\x00\x7f", "?[31mred??"},
		"bidirectional text": {"a\u202egpj.exe\u2069", "a?gpj.exe?"},
		"long":               {strings.Repeat("x", 1<<20), strings.Repeat("x", maxText) + "…"},
		"cut in a character": {"x" + strings.Repeat("ä", 1<<19), "x" + strings.Repeat("ä", maxText/2-1) + "…"},
	} {
		t.Run(name, func(t *testing.T) {
			p.Next("CreateVolume", csitest.Fail(codes.ResourceExhausted, tt.text))
			_, err := c.Controller().CreateVolume(within(t), createVolume("v", ""))
			s := status.Convert(err)
			if s.Code() != codes.ResourceExhausted || s.Message() != tt.want || !utf8.ValidString(s.Message()) {
				t.Errorf("got %v with %d bytes: %.100q", s.Code(), len(s.Message()), s.Message())
			}
		})
	}
}

// TestCodesAreThoseOfGRPC: the code of a driver is the value of a label.
func TestCodesAreThoseOfGRPC(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, _ := newClient(t, p, nil)
	connect(t, c)
	for code, want := range map[codes.Code]codes.Code{16: codes.Unauthenticated, 17: codes.Unknown, 1 << 20: codes.Unknown} {
		p.Next("CreateVolume", csitest.Fail(code, "full"))
		_, err := c.Controller().CreateVolume(within(t), createVolume("v", ""))
		if s := status.Convert(err); s.Code() != want || s.Message() != "full" {
			t.Errorf("code %d: got %v", code, err)
		}
	}
}

// TestOneTextForTheDeadline: a text that differs between attempts would be written to an object again.
func TestOneTextForTheDeadline(t *testing.T) {
	p := csitest.Run(t, csitest.Config{})
	c, _ := newClient(t, p, nil)
	connect(t, c)
	for driver, want := range map[string]string{
		"stream terminated by RST_STREAM with error code: CANCEL": context.DeadlineExceeded.Error(),
		"the storage is slow": "the storage is slow",
	} {
		p.Next("CreateVolume", csitest.Fail(codes.DeadlineExceeded, driver))
		_, err := c.Controller().CreateVolume(within(t), createVolume("v", ""))
		if s := status.Convert(err); s.Code() != codes.DeadlineExceeded || s.Message() != want {
			t.Errorf("%s: got %v", driver, err)
		}
	}
}

// TestErrorsDoNotKeepTheResponse keeps errors whose texts had 200 MiB together.
func TestErrorsDoNotKeepTheResponse(t *testing.T) {
	p := csitest.Run(t, csitest.Config{DiscardCalls: true})
	p.Always("DeleteVolume", csitest.Fail(codes.Internal, strings.Repeat("x", 1<<20)))
	c, _ := newClient(t, p, nil)
	connect(t, c)
	var kept []error
	before := heap()
	for range 200 {
		_, err := c.Controller().DeleteVolume(within(t), &csi.DeleteVolumeRequest{VolumeId: "v"})
		kept = append(kept, err)
	}
	if grown := heap() - before; grown > 50<<20 {
		t.Errorf("%d errors keep %d MiB", len(kept), grown>>20)
	}
	runtime.KeepAlive(kept)
}

func heap() int64 {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// TestResponsesAreBounded: only lists may be long.
func TestResponsesAreBounded(t *testing.T) {
	long := strings.Repeat("x", 5<<20)
	p := csitest.Run(t, csitest.Config{Controller: []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
	}})
	c, _ := newClient(t, p, nil)
	connect(t, c)
	p.Next("CreateVolume", csitest.Alter(func(r *csi.CreateVolumeResponse) { r.Volume.VolumeContext = map[string]string{"k": long} }))
	_, err := c.Controller().CreateVolume(within(t), createVolume("v", ""))
	if status.Code(err) != codes.ResourceExhausted || OutcomeOf(err) != Indeterminate {
		t.Errorf("a volume_context of 5 MiB: %.100v", err)
	}
	p.Next("ListVolumes", csitest.Alter(func(r *csi.ListVolumesResponse) {
		r.Entries[0].Volume.VolumeContext = map[string]string{"k": long}
	}))
	listed, err := c.Controller().ListVolumes(within(t), &csi.ListVolumesRequest{})
	if err != nil || len(listed.GetEntries()) != 1 {
		t.Errorf("a list of 5 MiB: %v", err)
	}
}

func TestCheckID(t *testing.T) {
	for id, want := range map[string]string{
		"vol-1": "", "": "", "/subscriptions/ä b": "", strings.Repeat("x", maxID): "",
		strings.Repeat("x", maxID+1): "the driver returned a volume_id of 1025 bytes",
		"a\nb":                       `the driver returned the volume_id "a\nb"`,
		"a\u202eb":                   `the driver returned the volume_id "a\u202eb"`,
	} {
		if got := CheckID("volume_id", id); (got == nil) != (want == "") || got != nil && !strings.HasPrefix(got.Error(), want) {
			t.Errorf("%.20q: %v", id, got)
		}
	}
}
