// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestDemo runs the whole demo: it checks each of its steps itself.
func TestDemo(t *testing.T) {
	t.Chdir("../..")
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	before := os.Stdout
	os.Stdout = out
	d := &demo{pods: 2, real: os.Getenv("KUBETEST") == "real", begin: time.Now()}
	err = d.run(t.Context(), false)
	os.Stdout = before
	d.close()
	text, errRead := os.ReadFile(out.Name())
	if err != nil || errRead != nil {
		t.Fatalf("%v, %v\n%s", err, errRead, text)
	}
	t.Logf("%s", text)
	for _, want := range []string{
		"attachment of data-web-0 to node-", "PersistentVolumeClaim default/stuck",
		"Secret default/missing (provisioner-secret-name) not found", " 0 failing", "/statusz "} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the demo does not print %q", want)
		}
	}
	if strings.Contains(string(text), "attachment of  to") {
		t.Error("an attachment has no name")
	}
	if len(d.numbers) < 4 {
		t.Errorf("numbers: %q", d.numbers)
	}
}
