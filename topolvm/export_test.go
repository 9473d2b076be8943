// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import "time"

// SetNow replaces the clock of s, before its first call.
func SetNow(s *Service, now func() time.Time) { s.now = now }

// Idle reports whether no call is running.
func Idle(s *Service) bool {
	s.running.mu.Lock()
	defer s.running.mu.Unlock()
	return len(s.running.calls) == 0
}
