// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/internal/app"
)

// TestDocsKeysOfTheChart: the chart knows the keys of a configuration file and the flags that are no keys, so that it
// refuses others before anything is installed. UPDATE=1 writes them.
func TestDocsKeysOfTheChart(t *testing.T) {
	const file = "../../deploy/helm/storage-controller/charts/storage-controller-library/templates/_configuration-keys.tpl"
	keys, more := app.All.Options().Keys(), []string{}
	for _, cmd := range newRoot("storage-controller").Commands() {
		if !slices.Contains([]string{"all", "provision", "attach", "resize", "snapshot", "capacity", "nodecontroller"}, cmd.Name()) {
			continue
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			known := slices.ContainsFunc(keys, func(key string) bool { return strings.ReplaceAll(key, ".", "-") == f.Name })
			if !known && !slices.Contains([]string{"help", "print-config", "version"}, f.Name) {
				more = append(more, f.Name)
			}
		})
	}
	slices.Sort(more)
	define := func(name string, lines []string) string {
		return "{{- define \"storage-controller." + name + "\" -}}\n" + strings.Join(lines, "\n") + "\n{{- end }}\n"
	}
	want := define("configurationKeys", keys) + define("moreFlags", slices.Compact(more))
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("%s is not up to date (%v): run make generate", file, err)
	}
}
