// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"maps"
	"sync"
	"time"
)

// LateAfter is the time within which a request to create a LogicalVolume that had no response takes effect, if it does. The API server
// ends a request after a minute by default.
const LateAfter = 2 * time.Minute

// unanswered has the names of LogicalVolumes that this process requested to create, without a response that excludes them. The zero value
// is empty. The requests of an earlier process are not known: the provisioner of this process repeats a refused CreateVolume until they
// have ended. A LogicalVolume that such a request creates after DeleteVolume is reported as unreferenced.
type unanswered struct {
	mu    sync.Mutex
	until map[string]time.Time
}

// add notes that a request to create the LogicalVolume had no response at the time now.
func (u *unanswered) add(name string, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.until == nil {
		u.until = map[string]time.Time{}
	}
	maps.DeleteFunc(u.until, func(_ string, until time.Time) bool { return now.After(until) })
	u.until[name] = now.Add(LateAfter)
}

// has reports whether such a request may still create the LogicalVolume at the time now.
func (u *unanswered) has(name string, now time.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return now.Before(u.until[name])
}
