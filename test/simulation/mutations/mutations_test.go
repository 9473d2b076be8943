// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/parser"
	"go/token"
	"testing"
)

// TestMutations checks that each mutation still applies to the code.
func TestMutations(t *testing.T) {
	if len(mutations) < 20 {
		t.Errorf("%d mutations, want at least 20", len(mutations))
	}
	for _, m := range mutations {
		file, mutated, err := m.apply("../../..")
		if err != nil {
			t.Error(err)
			continue
		}
		if _, err := parser.ParseFile(token.NewFileSet(), file, mutated, 0); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
	}
}
