// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

// VolumeLister is the part of csi.ControllerClient that [EachVolume] needs.
type VolumeLister interface {
	ListVolumes(context.Context, *csi.ListVolumesRequest, ...grpc.CallOption) (*csi.ListVolumesResponse, error)
}

// EachVolume calls ListVolumes until the last page and passes every entry to add. timeout bounds
// one page, and maxEntries its size; zero lets the driver choose. A token that the driver
// returns twice is an error, because the pages would never end.
func EachVolume(
	ctx context.Context, driver VolumeLister, timeout time.Duration, maxEntries int, add func(*csi.ListVolumesResponse_Entry),
) error {
	return eachPage("volumes", "ListVolumes", func(token string) (string, error) {
		call, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		page, err := driver.ListVolumes(call, &csi.ListVolumesRequest{MaxEntries: int32(maxEntries), StartingToken: token})
		for _, entry := range page.GetEntries() {
			add(entry)
		}
		return page.GetNextToken(), err
	})
}

// SnapshotLister is the part of csi.ControllerClient that [EachSnapshot] needs.
type SnapshotLister interface {
	ListSnapshots(context.Context, *csi.ListSnapshotsRequest, ...grpc.CallOption) (*csi.ListSnapshotsResponse, error)
}

// EachSnapshot calls ListSnapshots as [EachVolume] calls ListVolumes.
func EachSnapshot(ctx context.Context, driver SnapshotLister, timeout time.Duration, maxEntries int, add func(*csi.Snapshot)) error {
	return eachPage("snapshots", "ListSnapshots", func(token string) (string, error) {
		call, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		page, err := driver.ListSnapshots(call, &csi.ListSnapshotsRequest{MaxEntries: int32(maxEntries), StartingToken: token})
		for _, entry := range page.GetEntries() {
			add(entry.GetSnapshot())
		}
		return page.GetNextToken(), err
	})
}

// eachPage calls list with the token of each page until the last one.
func eachPage(what, method string, list func(token string) (next string, err error)) error {
	token, seen := "", map[string]struct{}{}
	for {
		next, err := list(token)
		if err != nil {
			return fmt.Errorf("listing the %s of the driver from token %q: %w", what, token, err)
		}
		if token = next; token == "" {
			return nil
		}
		if _, ok := seen[token]; ok {
			return fmt.Errorf("listing the %s of the driver: %s returned token %q twice. This is a bug of the driver", what, method, token)
		}
		seen[token] = struct{}{}
	}
}
