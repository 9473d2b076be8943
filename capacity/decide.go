// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"cmp"
	"slices"
	"strings"
	"time"

	storagev1 "k8s.io/api/storage/v1"
)

// plan lists what a sync of a pair has to do.
type plan struct {
	remove      []*storagev1.CSIStorageCapacity
	keep        *storagev1.CSIStorageCapacity // nil: there is none
	getCapacity bool                          // call the driver, then create or update keep
	next        time.Time                     // otherwise: time of the next sync; zero: only events enqueue
	reason      string
}

// decide returns the plan for a pair. It has no side effects. Of several objects the
// oldest is kept, because schedulers have used it longest.
func decide(s pairState) plan {
	objects := slices.SortedFunc(slices.Values(s.objects), func(a, b *storagev1.CSIStorageCapacity) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	inGrace := !s.hasNodes && s.removeAt.After(s.now)
	switch {
	case s.unmatched:
		return plan{remove: objects, reason: "NoSegment"}
	case s.class == nil && inGrace:
		return plan{remove: objects, next: s.removeAt, reason: "NoClass"}
	case s.class == nil:
		return plan{remove: objects, reason: "NoClass"}
	case !s.hasNodes && !inGrace:
		return plan{remove: objects, reason: "NoNode"}
	}
	p := plan{reason: "Due"}
	if len(objects) > 0 {
		p.keep, p.remove = objects[0], objects[1:]
	}
	// Another client may have created an older object since the last call.
	unknown := p.keep != nil && p.keep.UID != s.object
	switch {
	case inGrace:
		p.next, p.reason = s.removeAt, "LastNodeDeleted"
	case s.refresh, unknown, !s.due.After(s.now):
		p.getCapacity = true
	default:
		p.next, p.reason = s.due, "UpToDate"
	}
	return p
}
