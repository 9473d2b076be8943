// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

// pages maps a starting token to the next token; each page has one volume, named after it.
type pages map[string]string

func (p pages) ListVolumes(ctx context.Context, r *csi.ListVolumesRequest, _ ...grpc.CallOption) (*csi.ListVolumesResponse, error) {
	if _, limited := ctx.Deadline(); !limited || r.GetMaxEntries() != 7 {
		return nil, errors.New("no deadline, or another page size")
	}
	next, ok := p[r.GetStartingToken()]
	if !ok {
		return nil, errors.New("no such page")
	}
	volume := &csi.Volume{VolumeId: "vol" + r.GetStartingToken()}
	return &csi.ListVolumesResponse{NextToken: next, Entries: []*csi.ListVolumesResponse_Entry{{Volume: volume}}}, nil
}

func TestEachVolume(t *testing.T) {
	for name, tt := range map[string]struct {
		pages     pages
		want, err string
	}{
		"one page":              {pages{"": ""}, "vol", ""},
		"three pages":           {pages{"": "1", "1": "2", "2": ""}, "vol vol1 vol2", ""},
		"first page fails":      {nil, "", `token "": no such page`},
		"second page fails":     {pages{"": "1"}, "vol", `token "1": no such page`},
		"page names itself":     {pages{"": "1", "1": "1"}, "vol vol1", `"1" twice`},
		"page names an earlier": {pages{"": "1", "1": "2", "2": "1"}, "vol vol1 vol2", `"1" twice`},
	} {
		var got []string
		err := EachVolume(t.Context(), tt.pages, time.Minute, 7, func(e *csi.ListVolumesResponse_Entry) {
			got = append(got, e.GetVolume().GetVolumeId())
		})
		if strings.Join(got, " ") != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %q, error %v", name, got, err)
		}
	}
}

// endless returns pages with so many entries, each after delay, and no last one unless last is set.
type endless struct {
	entries int
	size    int // of the ID of one more entry
	delay   time.Duration
	pages   *int
	last    int // 0: none
}

func (e endless) ListSnapshots(context.Context, *csi.ListSnapshotsRequest, ...grpc.CallOption) (*csi.ListSnapshotsResponse, error) {
	time.Sleep(e.delay)
	*e.pages++
	r := &csi.ListSnapshotsResponse{Entries: make([]*csi.ListSnapshotsResponse_Entry, e.entries), NextToken: strconv.Itoa(*e.pages)}
	if e.size > 0 {
		id := strings.Repeat("x", e.size)
		r.Entries = append(r.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: &csi.Snapshot{SnapshotId: id}})
	}
	if *e.pages == e.last {
		r.NextToken = ""
	}
	return r, nil
}

func TestPagesThatNeverEnd(t *testing.T) {
	for name, tt := range map[string]struct {
		lister endless
		want   string
	}{
		"many entries": {endless{entries: 10_000}, "ListSnapshots returned 1000000 entries in 100 pages without an end"},
		"empty pages":  {endless{}, "ListSnapshots returned 0 entries in 1000001 pages without an end"},
		"large pages":  {endless{size: 100 << 20}, "ListSnapshots returned 314572854 bytes in 3 pages, more than 268435456"},
		"last page":    {endless{size: 200 << 20, last: 2}, "bytes in 2 pages, more than 268435456"},
		"slow pages":   {endless{delay: time.Minute}, "ListSnapshots returned 61 pages in 1h0m0s without an end"},
	} {
		synctest.Test(t, func(t *testing.T) {
			tt.lister.pages = new(int)
			err := EachSnapshot(t.Context(), tt.lister, time.Minute, 0, func(*csi.Snapshot) {})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s: %v after %d pages", name, err, *tt.lister.pages)
			}
		})
	}
}
