// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// withZone adds a variable with that value to the lines of a container.
func withZone(container, value string) string {
	return container + "        env: [{name: TZ, value: " + value + "}]\n"
}

// TestVariableThatNoFlagNames expects a note if one of two values is dropped.
func TestVariableThatNoFlagNames(t *testing.T) {
	t.Parallel()
	provisioner := withZone(sidecar("csi-provisioner"), "A")
	for value, note := range map[string]string{"A": "", "B": "the variable TZ of csi-attacher was dropped"} {
		r := migrated(t, deployment(provisioner, withZone(sidecar("csi-attacher"), value)), false)
		if strings.Contains(fmt.Sprint(r.Notes), "variable") != (note != "") || !strings.Contains(fmt.Sprint(r.Notes), note) {
			t.Errorf("%s: notes %q, want %q", value, r.Notes, note)
		}
		if strings.Contains(fmt.Sprint(r.Notes), "(B)") {
			t.Errorf("a note has the value, which may be a secret: %q", r.Notes)
		}
	}
	// The socket has one address for all, even if its variables differ.
	address := func(path string) string {
		return "      - name: csi-attacher\n        image: csi-attacher:v1\n        args: [--csi-address=$(A)]\n        env: [{name: A, " +
			"value: " + path + "}]\n        volumeMounts: [{name: s, mountPath: " + path + "}]\n"
	}
	first := strings.NewReplacer("csi-attacher", "csi-provisioner").Replace(address("/csi"))
	if r := migrated(t, deployment(first, address("/other")), false); strings.Contains(fmt.Sprint(r.Notes), "variable") {
		t.Errorf("notes %q", r.Notes)
	}
}

// TestNameInAnAnnotation migrates a pod with an AppArmor annotation. The API server rejects a pod
// whose annotation names a container that does not exist.
func TestNameInAnAnnotation(t *testing.T) {
	t.Parallel()
	manifest := strings.Replace(deployment(sidecar("csi-provisioner"), sidecar("csi-attacher")), "  template:\n",
		"  template:\n    metadata:\n      annotations: {container.apparmor.security.beta.kubernetes.io/csi-attacher: unconfined, "+
			"example.com/other: csi-attacher}\n", 1)
	const note = "container.apparmor.security.beta.kubernetes.io/csi-attacher names csi-attacher, which was removed"
	if r := migrated(t, manifest, false); !r.Rejected || !strings.Contains(fmt.Sprint(r.Notes), note) ||
		strings.Contains(fmt.Sprint(r.Notes), "example.com/other") {
		t.Errorf("rejected: %t, notes %q", r.Rejected, r.Notes)
	}
	if r := migrated(t, manifest, true); r.Rejected || strings.Contains(fmt.Sprint(r.Notes), "apparmor") {
		t.Errorf("the name has stayed; rejected: %t, notes %q", r.Rejected, r.Notes)
	}
}

func TestArgumentsThatAreRejected(t *testing.T) {
	t.Parallel()
	manifest := []byte(deployment(sidecar("csi-provisioner", "--timeout=soon")))
	o := Options{Image: image, Tables: tables()}
	for _, why := range []error{nil, errors.New("no duration")} {
		o.Tables.Accept = func([]string) error { return why }
		r, err := Run(manifest, o)
		if err != nil || r.Rejected != (why != nil) || !strings.Contains(string(r.Manifest), "--timeout=soon") {
			t.Errorf("%v: %v, rejected: %t\n%s", why, err, r.Rejected, r.Manifest)
		}
	}
}

// TestNamesOfBothLists expects unique names for containers and init containers.
func TestNamesOfBothLists(t *testing.T) {
	t.Parallel()
	stays := "      - name: storage-controller\n        image: other\n"
	for name, inits := range map[string]string{"one that stays": stays, "a new one": sidecar("csi-attacher")} {
		r := migrated(t, strings.Replace(deployment(sidecar("csi-provisioner")), "      containers:\n", "      initContainers:\n"+inits+
			"      containers:\n", 1), false)
		if strings.Count(string(r.Manifest), "- name: storage-controller\n") != 1 ||
			!strings.Contains(string(r.Manifest), "- name: storage-controller-provision\n") {
			t.Errorf("%s:\n%s", name, r.Manifest)
		}
	}
}

// TestCommentsInsideContainers expects the comments of a replaced container in the result.
func TestCommentsInsideContainers(t *testing.T) {
	t.Parallel()
	container := func(name, comment string) string {
		return "      - name: " + name + "\n        image: " + name +
			":v1\n        args:\n        - --csi-address=/csi/csi.sock\n        # " + comment +
			"\n        #- --timeout=1m\n        env: []\n"
	}
	for _, perRole := range []bool{false, true} {
		r := migrated(t, deployment(container("csi-attacher", "of the first"), container("csi-provisioner", "of the second")), perRole)
		for _, want := range []string{"of the first", "of the second", "- --timeout=1m"} {
			if n := strings.Count(string(r.Manifest), want); n == 0 || n > 1 && want[0] != '-' {
				t.Errorf("%d times %q:\n%s", n, want, r.Manifest)
			}
		}
		if !perRole && !strings.Contains(string(r.Manifest), "# csi-provisioner: of the second") {
			t.Errorf("the comment lacks the name of its container:\n%s", r.Manifest)
		}
	}
}
