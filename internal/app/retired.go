// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/settings"
)

// retired are flags of older releases of the sidecars. They set the flag of today, or have no effect.
var retired = []struct {
	name, today string // "": no effect
	value       string // of today, before the given one
}{
	{name: "csiTimeout", today: "timeout"},
	{name: "enable-leader-election", today: "leader-election"},
	{name: "enable-volume-group-snapshots", today: "feature-gates", value: "CSIVolumeGroupSnapshot="},
	{name: "leader-election-type"}, // leader election uses Leases
	{name: "leader-election-identity"},
	{name: "connection-timeout"}, // --timeout bounds each call
	{name: "provisioner"},        // the driver knows its name
	{name: "snapshotter"},
	{name: "provisioning-retry-count"}, // retries have no limit
	{name: "deletion-retry-count"},
	{name: "create-snapshotcontent-retrycount"},
	{name: "create-snapshotcontent-interval"},
	{name: "dummy"}, // a driver without PUBLISH_UNPUBLISH_VOLUME needs no flag
}

// Retired reports whether name is that of a flag of older releases of the sidecars, and the flag of today that has its effect, ""
// for none.
func Retired(name string) (today string, isRetired bool) {
	for _, r := range retired {
		if r.name == name {
			return r.today, true
		}
	}
	return "", false
}

// retiredNotes returns a note for the log about each retired flag that was set in fs. where names the section of fs.
func retiredNotes(fs *pflag.FlagSet, where string) (notes []string) {
	fs.Visit(func(f *pflag.Flag) {
		today, isRetired := Retired(f.Name)
		switch {
		case isRetired && today == "":
			notes = append(notes, fmt.Sprintf("--%s%s has no effect any more", f.Name, where))
		case isRetired:
			notes = append(notes, fmt.Sprintf("--%s%s is now --%s", f.Name, where, today))
		}
	})
	return notes
}

// addRetired adds the retired flags that replace a flag of fs, or none.
func addRetired(fs *pflag.FlagSet) {
	for _, r := range retired {
		if fs.Lookup(r.name) != nil {
			continue
		}
		if r.today == "" {
			settings.AddNoOp(fs, r.name, r.name != "dummy")
			continue
		}
		target := fs.Lookup(r.today)
		if target == nil {
			continue
		}
		value := &renamed{fs: fs, today: target.Name, before: r.value, kind: target.Value.Type()}
		f := fs.VarPF(value, r.name, "", "former name of --"+r.today)
		f.Hidden, f.NoOptDefVal = true, target.NoOptDefVal
		if r.value != "" {
			f.NoOptDefVal = "true"
		}
	}
}

// renamed is a flag that sets another one.
type renamed struct {
	fs                  *pflag.FlagSet
	today, before, kind string
}

func (r *renamed) String() string         { return "" }
func (r *renamed) Type() string           { return r.kind }
func (r *renamed) Set(value string) error { return r.fs.Set(r.today, r.before+value) }
