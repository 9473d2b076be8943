// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import "time"

// The roles of each command. All lists every role; roles are built in the order of their names.
var (
	All = Selection{all: true, roles: []Role{provisionerRole, attacherRole, capacityRole, nodecontrollerRole, resizerRole,
		snapshotterRole}}
	Provision = Selection{roles: []Role{provisionerRole, capacityRole}}
	Attach    = Selection{roles: []Role{attacherRole}}
	Capacity  = Selection{roles: []Role{capacityAlone}}
	Resize    = Selection{roles: []Role{resizerRole}}
	Snapshot  = Selection{roles: []Role{snapshotterRole}}
	// As in topolvm-controller, and unlike the sidecars: two replicas must not delete at the same time.
	Nodecontroller = Selection{roles: []Role{nodecontrollerRole}, defaults: func(s *Settings) {
		e := &s.ofRoles[nodecontrollerName].Election
		e.Enabled, e.Timing.RetryPeriod = true, 2*time.Second
	}}
)

// Leases returns the names of the Leases that the roles use for a driver.
func Leases(driver string) []string {
	var leases []string
	for _, r := range append(All.roles[:len(All.roles):len(All.roles)], capacityAlone) {
		leases = append(leases, r.lease(Settings{}, driver))
	}
	return leases
}
