// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/capacity"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/nodecontroller"
	"github.com/storage-controller/storage-controller/provisioner"
	"github.com/storage-controller/storage-controller/resizer"
	"github.com/storage-controller/storage-controller/snapshotter"
)

// Settings holds everything that an operator may set for a command, for all roles. Fields that no flag sets have their
// defaults; see for example attacherConfig.
type Settings struct {
	settings.Set   // its options set the fields
	Common         settings.Common
	Provisioner    provisioner.Config
	Attacher       attacher.Config
	Capacity       capacity.Config
	Nodecontroller nodecontroller.Config
	Resizer        resizer.Config
	Snapshotter    snapshotter.Config
	topolvm        serviceConfig
	ofRoles        map[string]*settings.Role // by the name of the role
	livenessprobe  *Livenessprobe            // nil unless the process replaces livenessprobe, too
}

// Role returns the settings that the role called name has as every role.
func (s Settings) Role(name string) settings.Role {
	if r := s.ofRoles[name]; r != nil {
		return *r
	}
	return settings.DefaultRole()
}

// newSettings returns the default settings of a command that runs c with sections. Its options set them.
func (c Selection) newSettings(sections ...settings.Section) *Settings {
	s := &Settings{
		Common: settings.DefaultCommon(), Provisioner: provisioner.DefaultConfig(), Attacher: attacher.DefaultConfig(),
		Capacity: capacity.DefaultConfig(), Nodecontroller: nodecontroller.DefaultConfig(), Resizer: resizer.DefaultConfig(),
		Snapshotter: snapshotter.DefaultConfig(), topolvm: defaultService(c.service), ofRoles: map[string]*settings.Role{},
	}
	for _, r := range All.roles {
		role := settings.DefaultRole()
		s.ofRoles[r.Name] = &role
	}
	s.Capacity.Enabled, s.Nodecontroller.ResizeNudge = c.all, !c.all
	if c.defaults != nil {
		c.defaults(s)
	}
	if len(sections) > 0 { // a section has the defaults of its image
		s.Capacity.Enabled, s.Nodecontroller.ResizeNudge = false, true
	}
	for _, section := range sections {
		if of := sectionRoles[section.Name]; of.defaults != nil {
			of.defaults(s)
		}
	}
	s.Prefixed = c.all
	common := settings.NewFlags(s.Common.AddFlags)
	if c.service {
		common.Lookup("csi-socket").Usage = "socket on which the CSI driver is served: an absolute path or unix://PATH"
	}
	own, others := settings.Split(common, c.hasOption)
	s.Groups = []settings.Group{
		{Flags: own}, {Flags: others, Unused: true},
		c.group(s, provisionerName, s.Provisioner.AddFlags),
		c.group(s, attacherName, s.Attacher.AddFlags),
		c.group(s, capacityName, s.Capacity.AddFlags),
		c.group(s, nodecontrollerName, func(fs *pflag.FlagSet) {
			s.Nodecontroller.AddFlags(fs)
			s.ofRoles[nodecontrollerName].Endpoint.AddTopolvmFlags(fs)
			if c.all {
				fs.Lookup("resize-nudge").Usage += ", which costs memory"
			}
		}),
		c.group(s, resizerName, s.Resizer.AddFlags),
		c.group(s, snapshotterName, s.Snapshotter.AddFlags),
		{Name: topolvmName, Flags: settings.NewFlags(s.topolvm.addFlags), Unused: !c.service},
	}
	if c.hasSections() {
		s.livenessprobe = newLivenessprobe()
		s.Groups = append(s.Groups, settings.Group{
			Name: livenessprobeName, Flags: settings.NewFlags(s.livenessprobe.addFlags), Unused: true, Separate: true,
		})
	}
	return s
}

// group returns the options of the role called name.
func (c Selection) group(s *Settings, name string, addFlags func(*pflag.FlagSet)) settings.Group {
	flags := settings.NewFlags(s.ofRoles[name].AddFlags)
	addFlags(flags)
	return settings.Group{Name: name, Flags: flags, Unused: !contains(c.roles, name)}
}

// hasOption reports whether a command that runs c has an option of the process. A configuration file may contain the others.
func (c Selection) hasOption(name string) bool {
	switch name {
	case "audit-interval":
		return contains(c.roles, provisionerName)
	case "csi-socket", "secure-metrics-server", "health-probe-bind-address", "profiling-bind-address",
		"print-config":
		return contains(c.roles, nodecontrollerName)
	case "controllers":
		return c.all
	case "csi-address", "exit-on-connection-loss": // of a connection to the driver
		return !c.service
	}
	return true
}

// Register adds the flags of a command that runs c to fs.
func (c Selection) Register(fs *pflag.FlagSet) {
	settings.Register(fs, func() settings.Set { return c.newSettings().Set })
	if c.hasSections() {
		addSections(fs)
	}
	if !c.all {
		addRetired(fs)
	}
}

// Read reads the settings of a command that runs c. version is that of the program.
func (c Selection) Read(fs *pflag.FlagSet, version string) (Config, error) {
	sections, err := sectionsOf(fs)
	if err != nil {
		return Config{}, err
	}
	read := func() (Settings, error) {
		s := c.newSettings(sections...)
		err := s.Load(fs, sections...)
		s.Notes = append(s.Notes, retiredNotes(fs, "")...)
		if err == nil {
			err = s.finish(sections)
		}
		return *s, err
	}
	s, err := read()
	if err == nil && c.service {
		s.Common.Logging, err = s.topolvm.logging(s.Common.Logging, s.Origin)
	}
	return Config{
		Settings: s, Selection: c, Version: version, declared: c.roles, file: settings.ConfigFile(fs), reread: read,
	}, err
}

// Options returns the options of a command that runs c, with their defaults.
func (c Selection) Options() settings.Set { return c.newSettings().Set }
