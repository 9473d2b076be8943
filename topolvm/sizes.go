// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"math"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

const (
	// sector is the unit of sizes in bytes.
	sector = 4096
	// defaultSize is the size in bytes if neither a size is required nor a minimum applies.
	defaultSize = 1 << 30
)

// of returns the minimum for a volume in bytes, by its first capability. Without a file system type, topolvm-node formats ext4.
func (m Minimum) of(capabilities []*csi.VolumeCapability) int64 {
	if len(capabilities) == 0 {
		return 0
	}
	if capabilities[0].GetBlock() != nil {
		return m.Block
	}
	switch capabilities[0].GetMount().GetFsType() {
	case "", "ext4":
		return m.Ext4
	case "xfs":
		return m.XFS
	case "btrfs":
		return m.Btrfs
	}
	return 0
}

// sizeOf returns the size that r requests for about in bytes, a multiple of the sector. minimum raises the required size; 0 or less
// means none.
func sizeOf(about subject, r *csi.CapacityRange, minimum int64) (Bytes, error) {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	if required < 0 || limit < 0 {
		return 0, about.errorf(codes.InvalidArgument, "required_bytes %d and limit_bytes %d must not be negative", required, limit)
	}
	required = max(required, minimum)
	if required == 0 {
		required = defaultSize
		if limit > 0 {
			required = min(required, limit-limit%sector)
		}
	}
	if required > math.MaxInt64-sector {
		return 0, about.errorf(codes.OutOfRange, "%d bytes are more than a volume can have. Request less", required)
	}
	size := (required + sector - 1) / sector * sector
	if size == 0 || limit > 0 && size > limit {
		return 0, about.errorf(codes.OutOfRange, "no size fits: limit_bytes is %d, but the volume needs at least %d bytes, rounded up to "+
			"sectors of %d. Request less, or raise the limit", limit, max(size, sector), sector)
	}
	return Bytes(size), nil
}
