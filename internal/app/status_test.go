// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"net/http/httptest"
	"strings"
	"testing"
)

// TestPagesShowNoPassword: a setting that has one is shown without it.
func TestPagesShowNoPassword(t *testing.T) {
	c := configOf(t, All, "--master=https://me:hidden@api.example.com:6443/path")
	if c.Common.Master != "https://me:hidden@api.example.com:6443/path" {
		t.Errorf("it is not used as it was given: %q", c.Common.Master)
	}
	page := httptest.NewRecorder()
	(&status{cfg: c}).flags(page, nil)
	if body := page.Body.String(); strings.Contains(body, "hidden") || !strings.Contains(body,
		"https://me:xxxxx@api.example.com:6443/path") {
		t.Error(body)
	}
}
