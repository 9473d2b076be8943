// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package volumerules

import "fmt"

// plausibleExcess is the size by which a volume may exceed twice the request. The smallest volumes of some storage systems have one or
// two TiB.
const plausibleExcess = 4 << 40

// CapacityWarning returns a warning if rpc has returned a capacity_bytes that no rounding explains, else "". The volume is used
// nevertheless: requests have no limit_bytes, so the CSI specification permits any larger size.
func CapacityWarning(rpc, handle string, reported, requested int64) string {
	if reported/2 <= requested || reported-requested*2 <= plausibleExcess {
		return ""
	}
	return fmt.Sprintf("%s returned capacity_bytes %d for volume %q, for a request of %d bytes. "+
		"Verify the size of the volume on the storage backend. If it is smaller, correct the driver", rpc, reported, handle, requested)
}
