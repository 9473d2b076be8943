package main

import (
	"net/http/httptest"
	"strings"
	"testing"
)

// TestPagesShowNoPassword: a setting that has one is shown without it.
func TestPagesShowNoPassword(t *testing.T) {
	cmd := newRoleCommand("all", "x", true, allRoles()...)
	if err := cmd.ParseFlags([]string{"--master=https://me:hidden@api.example.com:6443/path"}); err != nil {
		t.Fatal(err)
	}
	s, err := readSettings(cmd.Flags(), true, allRoles())
	if err != nil {
		t.Fatal(err)
	}
	if s.Common.Master != "https://me:hidden@api.example.com:6443/path" {
		t.Errorf("it is not used as it was given: %q", s.Common.Master)
	}
	page := httptest.NewRecorder()
	(&status{settings: s}).flags(page, nil)
	if body := page.Body.String(); strings.Contains(body, "hidden") || !strings.Contains(body, "https://me:xxxxx@api.example.com:6443/path") {
		t.Error(body)
	}
}
