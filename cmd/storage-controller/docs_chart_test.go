package main

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// TestDocsKeysOfTheChart: the chart knows the keys of a configuration file, so that it
// refuses others before anything is installed. UPDATE=1 writes them.
func TestDocsKeysOfTheChart(t *testing.T) {
	const file = "../../deploy/helm/storage-controller/files/configuration-keys.txt"
	keys := []string{"apiVersion", "kind"}
	for _, o := range commonOptions(true, allRoles()...) {
		if !slices.Contains(flagOnly, o.name) {
			keys = append(keys, o.name)
		}
	}
	for _, role := range allRoleOptions(true) {
		keys = append(keys, role.section)
		for _, o := range role.options {
			keys = append(keys, o.name, role.section+"."+o.name)
		}
	}
	slices.Sort(keys)
	want := strings.Join(slices.Compact(keys), "\n") + "\n"
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("%s is not up to date (%v): run make generate", file, err)
	}
}
