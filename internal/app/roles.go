// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import "github.com/storage-controller/storage-controller/internal/settings"

// The roles of each command. All lists every role; roles are built in the order of their names.
var (
	All = Selection{all: true, roles: []Role{provisionerRole, attacherRole, capacityRole, nodecontrollerRole, resizerRole,
		snapshotterRole}}
	Provision      = Selection{roles: []Role{provisionerRole, capacityRole}}
	Attach         = Selection{roles: []Role{attacherRole}}
	Capacity       = Selection{roles: []Role{capacityAlone}}
	Resize         = Selection{roles: []Role{resizerRole}}
	Snapshot       = Selection{roles: []Role{snapshotterRole}}
	Nodecontroller = Selection{roles: []Role{nodecontrollerRole}}
)

// Sections returns the options of every role, without those that only "all" has.
func Sections() []settings.Section {
	var sections []settings.Section
	for _, r := range All.roles {
		sections = append(sections, settings.Section{Name: r.Name, Options: r.options(false), Config: r.config})
	}
	return sections
}

// Leases returns the names of the Leases that the roles use for a driver.
func Leases(driver string) []string {
	var leases []string
	for _, r := range append(All.roles[:len(All.roles):len(All.roles)], capacityAlone) {
		leases = append(leases, r.lease(settings.Settings{}, driver))
	}
	return leases
}
