// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Section is a part of a command line in the words of an image that the process replaces.
type Section struct {
	Name  string         // of the image
	Roles []string       // whose options Flags set
	Flags *pflag.FlagSet // parsed
}

// ofRole reports whether a section has an option as one of its roles, not as one of the process.
func (s *Set) ofRole(section Section, option string) bool {
	return slices.ContainsFunc(s.Groups, func(g Group) bool {
		return g.Name != "" && slices.Contains(section.Roles, g.Name) && g.has(option)
	})
}

// changed returns the first of the flags called names that was set, nil if none was.
func changed(fs *pflag.FlagSet, names ...string) *pflag.Flag {
	for _, name := range names {
		if f := fs.Lookup(name); f != nil && f.Changed {
			return f
		}
	}
	return nil
}

// opinion is the value of an option of the process in a section, or before the first one.
type opinion struct{ where, value string }

// agree returns the value of an option of the process that sections may set, too. value is that of other sources, nil for none.
// An option that no section sets keeps it.
func (s *Set) agree(f *pflag.Flag, value any, origin Origin, sections []Section) (any, Origin, error) {
	var set, all []opinion
	for _, section := range sections {
		own := section.Flags.Lookup(f.Name)
		switch {
		case own == nil || s.ofRole(section, f.Name):
		case own.Changed:
			set = append(set, opinion{"section " + section.Name, listText(given(own))})
			all = append(all, set[len(set)-1])
		case value != nil:
			all = append(all, opinion{"section " + section.Name, listText(value)})
		default:
			all = append(all, opinion{"section " + section.Name, f.DefValue})
		}
	}
	if len(set) == 0 {
		return value, origin, nil
	}
	if origin == OriginFlag {
		set = append(set, opinion{"the flags before the sections", listText(value)})
	}
	switch f.Name {
	case "csi-address", "kubeconfig", "master": // the default is a value, too
		set = all
	}
	chosen, err := s.choose(f.Name, set)
	return chosen, OriginFlag, err
}

// listText returns a value as the text for its flag.
func listText(value any) string {
	if list, ok := value.([]string); ok {
		return strings.Join(list, ",")
	}
	return fmt.Sprint(value)
}

// choose returns the value of an option from opinions, of which there is at least one.
func (s *Set) choose(option string, opinions []opinion) (string, error) {
	chosen := opinions[0]
	for _, o := range opinions[1:] {
		switch {
		case o.value == chosen.value:
		case option == "csi-address" && socketPath(o.value) == socketPath(chosen.value):
		case option == "vmodule":
			chosen.value += "," + o.value
		case option == "v" && number(o.value) > number(chosen.value), mayBeSmallest(option) && smaller(o.value, chosen.value):
			chosen = o
		case option == "v", mayBeSmallest(option):
		default:
			return "", fmt.Errorf("--%s: %s has %q, %s has %q: %s", option, chosen.where, chosen.value, o.where, o.value, oneValue(option))
		}
	}
	if slices.ContainsFunc(opinions, func(o opinion) bool { return o.value != chosen.value }) {
		s.Notes = append(s.Notes, fmt.Sprintf("--%s=%s of %s applies to the process", option, chosen.value, chosen.where))
	}
	return chosen.value, nil
}

// oneValue explains why a process cannot have two values of an option.
func oneValue(option string) string {
	switch option {
	case "csi-address":
		return "one process serves one driver. Run one container for each"
	case "kubeconfig", "master":
		return "one process has one API server. Run one container for each"
	}
	return "the option is one of the process. Set it once, before the first section"
}

// socketPath returns the path of a socket, however it is written.
func socketPath(address string) string {
	return path.Clean(strings.TrimPrefix(strings.TrimPrefix(address, "unix:"), "//"))
}

// mayBeSmallest reports whether the smallest positive value of an option serves all sections.
func mayBeSmallest(option string) bool {
	return option == "max-grpc-log-length" || option == "log-flush-frequency"
}

// smaller reports whether a limit is smaller than another; 0 and less is none.
func smaller(a, b string) bool { return number(a) > 0 && (number(b) <= 0 || number(a) < number(b)) }

// number returns a number or a duration, 0 for another text.
func number(text string) float64 {
	if d, err := time.ParseDuration(text); err == nil {
		return d.Seconds()
	}
	n, _ := strconv.ParseFloat(text, 64)
	return n
}

// LongFlags returns args with two dashes before the long flags of fs: programs in Go also accept one. It ends at "--".
func LongFlags(fs *pflag.FlagSet, args []string) []string {
	out := slices.Clone(args)
	for i, arg := range out {
		if arg == "--" {
			break
		}
		if !strings.HasPrefix(arg, "-") || strings.HasPrefix(arg, "--") {
			continue
		}
		long, _, _ := strings.Cut(arg[1:], "=")
		if len(long) > 1 && fs.Lookup(long) != nil {
			out[i] = "-" + arg
		}
	}
	return out
}
