// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"
	"time"
)

// TestDemo runs the whole demo: it checks each of its steps itself.
func TestDemo(t *testing.T) {
	t.Chdir("../..")
	d := &demo{replicas: 2, begin: time.Now()}
	defer d.close()
	if err := d.run(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if len(d.numbers) < 4 {
		t.Errorf("numbers: %q", d.numbers)
	}
}
