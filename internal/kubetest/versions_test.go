// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestControlPlaneHasTheSelectedVersion asks the API server for its version.
func TestControlPlaneHasTheSelectedVersion(t *testing.T) {
	want, err := SelectedVersion()
	if err != nil {
		t.Fatal(err)
	}
	got, err := Get(t, WithAudit()).Client().Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	if got.GitVersion != want.Kubernetes {
		t.Errorf("the API server has version %s, want %s", got.GitVersion, want.Kubernetes)
	}
}

func TestVersions(t *testing.T) {
	const etcd = "\tgo.etcd.io/etcd/server/v3 v3.6.0 // indirect\n"
	for name, tt := range map[string]struct {
		files map[string]string
		want  []string // minors
		err   string
	}{
		"sorted by number": {files: map[string]string{
			"go.mod":             "require (\n\tk8s.io/kubernetes v1.10.3\n" + etcd + ")\n",
			"versions/1.9.mod":   "require k8s.io/kubernetes v1.9.12\nrequire (\n" + etcd + ")\n",
			"versions/1.100.mod": "require (\n\tk8s.io/kubernetes v1.100.0\n" + etcd + ")\n",
		}, want: []string{"1.9", "1.10", "1.100"}},
		"no version": {
			files: map[string]string{"go.mod": "replace k8s.io/kubernetes => ../x\n"}, err: "go.mod: version of k8s.io/kubernetes",
		},
		"wrong name": {files: map[string]string{
			"go.mod":            "require k8s.io/kubernetes v1.10.3\n",
			"versions/1.11.mod": "require k8s.io/kubernetes v1.12.0\n",
		}, err: "versions/1.11.mod: requires Kubernetes v1.12.0: rename the file"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "versions"), 0o700); err != nil {
				t.Fatal(err)
			}
			for file, text := range tt.files {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			versions, err := versionsIn(dir)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got error %v, want %q", err, tt.err)
				}
				return
			}
			var got []string
			for _, v := range versions {
				got = append(got, v.Minor())
				if v.Etcd != "v3.6.0" {
					t.Errorf("%s: etcd %q", v.Kubernetes, v.Etcd)
				}
			}
			if err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("got %v, error %v, want %v", got, err, tt.want)
			}
		})
	}
}

func TestSelectVersion(t *testing.T) {
	versions := []Version{{Kubernetes: "v1.9.1", ModFile: "a/versions/1.9.mod"}, {Kubernetes: "v1.10.0", ModFile: "a/go.mod"}}
	for minor, want := range map[string]string{"": "v1.10.0", "1.10": "v1.10.0", "1.9": "v1.9.1"} {
		if got, err := selectVersion(versions, minor); err != nil || got.Kubernetes != want {
			t.Errorf("minor %q: got %s, error %v, want %s", minor, got.Kubernetes, err, want)
		}
	}
	if _, err := selectVersion(versions, "1.1"); err == nil || !strings.HasSuffix(err.Error(), `"1.1": use one of 1.9, 1.10`) {
		t.Errorf("an unknown minor: got error %v", err)
	}
}
