// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/storage-controller/storage-controller/internal/app"
)

// TestDocsKeysOfTheChart: the chart knows the keys of a configuration file, so that it
// refuses others before anything is installed. UPDATE=1 writes them.
func TestDocsKeysOfTheChart(t *testing.T) {
	const file = "../../deploy/helm/storage-controller/charts/storage-controller-library/templates/_configuration-keys.tpl"
	want := "{{- define \"storage-controller.configurationKeys\" -}}\n" + strings.Join(app.All.Schema().Keys(), "\n") + "\n{{- end }}\n"
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("%s is not up to date (%v): run make generate", file, err)
	}
}
