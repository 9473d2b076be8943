// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// split is the kubeconfig of the administrator in two files, of which neither is of use
// alone: the server and the context, and the user. A third one does not exist. It is the
// value of KUBECONFIG.
func (e *env) split() string {
	e.t.Helper()
	whole, err := clientcmd.LoadFromFile(e.cp.Kubeconfig())
	if err != nil {
		e.t.Fatal(err)
	}
	users := clientcmdapi.NewConfig()
	users.AuthInfos, whole.AuthInfos = whole.AuthInfos, nil
	dir := e.t.TempDir()
	files := []string{filepath.Join(dir, "none"), filepath.Join(dir, "server"), filepath.Join(dir, "user")}
	if err := errors.Join(clientcmd.WriteToFile(*whole, files[1]), clientcmd.WriteToFile(*users, files[2])); err != nil {
		e.t.Fatal(err)
	}
	return strings.Join(files, string(filepath.ListSeparator))
}

// home is a home directory with the kubeconfig of the administrator.
func (e *env) home() string {
	e.t.Helper()
	home := e.t.TempDir()
	config, err := os.ReadFile(e.cp.Kubeconfig())
	if err := errors.Join(err, os.Mkdir(filepath.Join(home, ".kube"), 0o700),
		os.WriteFile(filepath.Join(home, ".kube", "config"), config, 0o600)); err != nil {
		e.t.Fatal(err)
	}
	return home
}

// TestKubeconfigOfAPerson has each command that a person runs find the API server as
// kubectl does, without a flag.
func TestKubeconfigOfAPerson(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	driver := " --driver-name=" + e.plugin.Name()
	commands := map[string]string{ // what it says when it has reached the API server
		"explain pv none-" + e.ns: fmt.Sprintf("PersistentVolume %q: not found", "none-"+e.ns),
		"doctor" + driver:         "no CSIDriver object",
		"audit --settle=10ms --csi-address=" + e.plugin.Address(): "LIST_VOLUMES",
		"nodecontroller approve" + driver:                         "no records of lost nodes",
		"nodecontroller remove-finalizers" + driver:               "", // no node has it
	}
	nowhere := t.TempDir()
	for name, c := range map[string]struct {
		env     []string
		reached bool
	}{
		"the files of KUBECONFIG": {[]string{"KUBECONFIG=" + e.split(), "HOME=" + nowhere}, true},
		"the home directory":      {[]string{"KUBECONFIG=", "HOME=" + e.home()}, true},
		"no file":                 {[]string{"KUBECONFIG=", "HOME=" + nowhere}, false},
		"KUBECONFIG and the home": {[]string{"KUBECONFIG=" + nowhere + "/none", "HOME=" + e.home()}, false},
		"a pod without a token": {[]string{"KUBECONFIG=", "HOME=" + e.home(), "KUBERNETES_SERVICE_HOST=::1",
			"KUBERNETES_SERVICE_PORT=1"}, false},
		"no file of KUBECONFIG there": {[]string{"KUBECONFIG=" + nowhere + "/a:" + nowhere + "/b", "HOME=" + e.home()}, false},
	} {
		for args, says := range commands {
			cmd := exec.Command(path, strings.Fields(args)...)
			cmd.Env = c.env
			out, _ := cmd.CombinedOutput() // the exit code is that of another finding
			said := string(out)
			if reached := !strings.Contains(said, "Set --kubeconfig"); reached != c.reached || reached && !strings.Contains(said, says) {
				t.Errorf("%s, %s: %s", name, args, said)
			}
		}
	}
}

// TestKubeconfigOfARole merges the files of KUBECONFIG, and does not read ~/.kube/config.
func TestKubeconfigOfARole(t *testing.T) {
	e := newEnv(t, csitest.Config{}, 0)
	cmd := e.command("provision")
	cmd.Env = []string{"KUBECONFIG=" + e.split()}
	e.start(cmd)
	e.claim("c", e.class(false, nil))
	e.bound("c")
	e.leftovers("c")

	_, stderr, code := e.once([]string{"HOME=" + e.home()}, "provision", "--kubeconfig=")
	if code == 0 || !strings.Contains(stderr, "Set --kubeconfig outside of a cluster") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}
