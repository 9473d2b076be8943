// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package csiclient

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// VolumeLister is the part of csi.ControllerClient that [EachVolume] needs.
type VolumeLister interface {
	ListVolumes(context.Context, *csi.ListVolumesRequest, ...grpc.CallOption) (*csi.ListVolumesResponse, error)
}

// EachVolume calls ListVolumes until the last page and passes every entry to add. timeout bounds
// one page, and maxEntries its size; zero lets the driver choose. Pages that never end are an error.
func EachVolume(
	ctx context.Context, driver VolumeLister, timeout time.Duration, maxEntries int, add func(*csi.ListVolumesResponse_Entry),
) error {
	return eachPage("volumes", "ListVolumes", func(token string) (int, int, string, error) {
		call, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		page, err := driver.ListVolumes(call, &csi.ListVolumesRequest{MaxEntries: int32(maxEntries), StartingToken: token})
		for _, entry := range page.GetEntries() {
			add(entry)
		}
		return len(page.GetEntries()), proto.Size(page), page.GetNextToken(), err
	})
}

// SnapshotLister is the part of csi.ControllerClient that [EachSnapshot] needs.
type SnapshotLister interface {
	ListSnapshots(context.Context, *csi.ListSnapshotsRequest, ...grpc.CallOption) (*csi.ListSnapshotsResponse, error)
}

// EachSnapshot calls ListSnapshots as [EachVolume] calls ListVolumes.
func EachSnapshot(ctx context.Context, driver SnapshotLister, timeout time.Duration, maxEntries int, add func(*csi.Snapshot)) error {
	return eachPage("snapshots", "ListSnapshots", func(token string) (int, int, string, error) {
		call, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		page, err := driver.ListSnapshots(call, &csi.ListSnapshotsRequest{MaxEntries: int32(maxEntries), StartingToken: token})
		for _, entry := range page.GetEntries() {
			add(entry.GetSnapshot())
		}
		return len(page.GetEntries()), proto.Size(page), page.GetNextToken(), err
	})
}

const (
	// maxListed bounds the entries of a list plus its pages. A cluster has fewer volumes, also of a driver whose list includes others.
	maxListed = 1_000_000
	// maxListTime bounds the time of a list.
	maxListTime = time.Hour
)

// eachPage calls list with the token of each page until the last one. list returns the number of entries and of bytes, and the next
// token. The callers keep entries: all pages together have the limit of one, maxListResponse.
func eachPage(what, method string, list func(token string) (entries, bytes int, next string, err error)) error {
	token, listed, received, start := "", 0, 0, time.Now()
	seen := map[[sha256.Size]byte]struct{}{} // a token may be long
	for {
		entries, bytes, next, err := list(token)
		if err != nil {
			return fmt.Errorf("listing the %s of the driver from token %.100q: %w", what, token, err)
		}
		token, received = next, received+bytes
		if token == "" && received <= maxListResponse {
			return nil
		}
		hash := sha256.Sum256([]byte(token))
		_, repeated := seen[hash]
		seen[hash] = struct{}{}
		listed += entries + 1
		switch {
		case repeated:
			err = fmt.Errorf("%s returned token %.100q twice. This is a bug of the driver", method, token)
		case received > maxListResponse:
			err = fmt.Errorf("%s returned %d bytes in %d pages, more than %d. Check the driver",
				method, received, len(seen), maxListResponse)
		case listed > maxListed:
			err = fmt.Errorf("%s returned %d entries in %d pages without an end. Check the driver", method, listed-len(seen), len(seen))
		case time.Since(start) > maxListTime:
			err = fmt.Errorf("%s returned %d pages in %v without an end. Check the driver", method, len(seen), maxListTime)
		}
		if err != nil {
			return fmt.Errorf("listing the %s of the driver: %w", what, err)
		}
	}
}
