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
	token, seen := "", map[string]struct{}{}
	for {
		call, cancel := context.WithTimeout(ctx, timeout)
		page, err := driver.ListVolumes(call, &csi.ListVolumesRequest{MaxEntries: int32(maxEntries), StartingToken: token})
		cancel()
		if err != nil {
			return fmt.Errorf("listing the volumes of the driver from token %q: %w", token, err)
		}
		for _, entry := range page.GetEntries() {
			add(entry)
		}
		if token = page.GetNextToken(); token == "" {
			return nil
		}
		if _, ok := seen[token]; ok {
			return fmt.Errorf("listing the volumes of the driver: ListVolumes returned token %q twice. This is a bug of the driver", token)
		}
		seen[token] = struct{}{}
	}
}
