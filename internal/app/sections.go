// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/settings"
)

// sectionRoles has the roles of each section, by the name of the image that it replaces. The section livenessprobe has none.
var sectionRoles = map[string]Selection{
	"csi-provisioner": Provision, "csi-attacher": Attach, "csi-resizer": Resize, "csi-snapshotter": Snapshot,
	capacityName: Capacity, nodecontrollerName: Nodecontroller, livenessprobeName: {},
}

// sectionFlag is a hidden flag. It has a section as a list of words in JSON, so that everything that passes flags on passes the
// sections on.
const sectionFlag = "section"

// WithSections returns args with the sections at its end, each of which begins with "--", as flags for fs. A command without
// sections gets args.
func WithSections(fs *pflag.FlagSet, args []string) []string {
	begin := slices.Index(args, "--")
	if begin < 0 || fs.Lookup(sectionFlag) == nil {
		return args
	}
	out := slices.Clone(args[:begin])
	for rest := args[begin:]; len(rest) > 0; {
		words := rest[1:]
		end := slices.Index(words, "--")
		if end < 0 {
			end = len(words)
		}
		text, _ := json.Marshal(words[:end:end]) // of texts
		out, rest = append(out, "--"+sectionFlag+"="+string(text)), words[end:]
	}
	return out
}

// HelpOfSection returns the name of the section in args that requests its help, "" for none.
func HelpOfSection(args []string) string {
	name, begins := "", false
	for _, arg := range args {
		switch {
		case arg == "--":
			begins = true
		case begins:
			name, begins = arg, false
		case arg == "--help" || arg == "-h":
			if _, known := sectionRoles[name]; known {
				return name
			}
		}
	}
	return ""
}

// texts is a flag that may be repeated.
type texts []string

func (t *texts) String() string { return "" }
func (t *texts) Type() string   { return "string" }
func (t *texts) Set(text string) error {
	*t = append(*t, text)
	return nil
}

func addSections(fs *pflag.FlagSet) {
	fs.Var(&texts{}, sectionFlag, "a section, as a list of words in JSON")
	fs.Lookup(sectionFlag).Hidden = true
}

// sectionsOf returns the sections in fs.
func sectionsOf(fs *pflag.FlagSet) ([]settings.Section, error) {
	f := fs.Lookup(sectionFlag)
	if f == nil {
		return nil, nil
	}
	var sections []settings.Section
	for _, text := range *f.Value.(*texts) {
		var words []string
		if err := json.Unmarshal([]byte(text), &words); err != nil {
			return nil, fmt.Errorf("--%s: %w", sectionFlag, err)
		}
		section, err := parseSection(words)
		if err != nil {
			return nil, err
		}
		for _, other := range sections {
			switch {
			case other.Name == section.Name:
				return nil, fmt.Errorf("section %s: set twice", section.Name)
			case slices.ContainsFunc(section.Roles, func(role string) bool { return slices.Contains(other.Roles, role) }):
				return nil, fmt.Errorf("sections %s and %s: both set the role capacity. Remove the section capacity, and set "+
					"--enable-capacity in the section csi-provisioner", other.Name, section.Name)
			}
		}
		sections = append(sections, section)
	}
	if len(sections) > 0 && !slices.ContainsFunc(sections, func(s settings.Section) bool { return s.Name != livenessprobeName }) {
		return nil, errors.New("section livenessprobe: requires a section with a role. Run the command livenessprobe instead")
	}
	return sections, nil
}

// parseSection parses the words of a section: its name, and flags as in the image of that name.
func parseSection(words []string) (settings.Section, error) {
	known := slices.Sorted(maps.Keys(sectionRoles))
	if len(words) == 0 {
		return settings.Section{}, fmt.Errorf("the name of a section must follow --: %s", strings.Join(known, ", "))
	}
	s := settings.Section{Name: words[0], Flags: pflag.NewFlagSet(words[0], pflag.ContinueOnError)}
	roles, ok := sectionRoles[s.Name]
	switch {
	case s.Name == "topolvm-controller":
		return s, errors.New("section topolvm-controller: run the command topolvm instead, which serves the driver, too")
	case !ok:
		return s, fmt.Errorf("unknown section %q: must be one of %s", s.Name, strings.Join(known, ", "))
	case s.Name == livenessprobeName:
		RegisterLivenessprobe(s.Flags)
		s.Roles = []string{livenessprobeName}
	default:
		roles.Register(s.Flags)
		s.Roles = roles.Names()
	}
	if err := s.Flags.Parse(settings.LongFlags(s.Flags, words[1:])); err != nil {
		return s, fmt.Errorf("section %s: %w; see %q", s.Name, err, s.Name+" --help")
	}
	return s, nil
}

// finish completes settings that were loaded with sections, which name the roles.
func (s *Settings) finish(sections []settings.Section) error {
	probe := slices.ContainsFunc(sections, func(s settings.Section) bool { return s.Name == livenessprobeName })
	if !probe && !s.AnyOf(livenessprobeName) {
		s.livenessprobe = nil
	}
	if len(sections) == 0 {
		return nil
	}
	if s.Origin("controllers") != "" {
		return errors.New("--controllers: cannot be set with sections, which name the roles")
	}
	var roles []string
	for _, section := range sections {
		for _, role := range section.Roles {
			if role != livenessprobeName && (role != capacityName || section.Name == capacityName || s.Capacity.Enabled) {
				roles = append(roles, role)
			}
		}
		for _, word := range section.Flags.Args() {
			s.Notes = append(s.Notes, fmt.Sprintf("argument %q of section %s ignored: it is not a flag", word, section.Name))
		}
		s.Notes = append(s.Notes, retiredNotes(section.Flags, " of section "+section.Name)...)
	}
	return s.Derive("controllers", strings.Join(roles, ","))
}
