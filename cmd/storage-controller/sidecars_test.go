// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8syaml "sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

// sidecarContainer is a container of a published manifest that runs a sidecar.
type sidecarContainer struct {
	object, sidecar string
	corev1.Container
}

var workloads = []string{"Deployment", "StatefulSet", "DaemonSet"}

// sidecarContainers returns the containers with sidecars of the published manifests.
func sidecarContainers(t *testing.T) []sidecarContainer {
	t.Helper()
	files, err := filepath.Glob(migrateTestdata + "published/*.yaml")
	if err != nil || len(files) < 7 {
		t.Fatalf("%d manifests: %v", len(files), err)
	}
	var all []sidecarContainer
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for doc := range strings.SplitSeq("\n"+string(text), "\n---") {
			var w struct {
				Kind     string            `json:"kind"`
				Metadata metav1.ObjectMeta `json:"metadata"`
				Spec     struct {
					Template corev1.PodTemplateSpec `json:"template"`
				} `json:"spec"`
			}
			if err := k8syaml.Unmarshal([]byte(doc), &w); err != nil || !slices.Contains(workloads, w.Kind) {
				continue
			}
			for _, c := range w.Spec.Template.Spec.Containers {
				if sidecar := migrate.Sidecar(c.Name, c.Image, c.Args); sidecar != "" {
					all = append(all, sidecarContainer{filepath.Base(file) + "/" + w.Metadata.Name, sidecar, c})
				}
			}
		}
	}
	if len(all) < 30 {
		t.Fatalf("%d containers with sidecars", len(all))
	}
	return all
}

// TestCommandLinesOfPublishedManifests runs the arguments of each sidecar under the name of the sidecar, with a driver
// and an API server. It accepts all flags and becomes ready: connected to the driver, watching, and with its role
// running. livenessprobe reports a healthy driver. The address of the socket and of the HTTP endpoint differ
// from the manifest. A fork's own flags are refused by name.
func TestCommandLinesOfPublishedManifests(t *testing.T) {
	c := kubetest.Get(t, kubetest.Real())
	kubetest.InstallCRDs(t, c)
	const node = "sidecars-node"
	if err := kubetest.CreateNode(t.Context(), c.Client(), kubetest.NodeSpec{Name: node}); err != nil {
		t.Fatal(err)
	}
	namespace := kubetest.Namespace(t, c)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "pod"}, Spec: corev1.PodSpec{
		Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	if _, err := c.Client().CoreV1().ServiceAccounts(namespace).Create(t.Context(), account, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Client().CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	environment := []string{"KUBECONFIG=" + c.Kubeconfig(), "POD_NAME=" + pod.Name, "POD_NAMESPACE=" + namespace,
		"NAMESPACE=" + namespace, "NODE_NAME=" + node, "PATH=" + os.Getenv("PATH")}
	t.Run("all", func(t *testing.T) {
		for i, container := range sidecarContainers(t) {
			t.Run(fmt.Sprintf("%s/%s-%d", container.object, container.Name, i), func(t *testing.T) {
				t.Parallel()
				driver := csitest.Run(t, csitest.Config{Name: fmt.Sprintf("drv-%d.example.com", i), NodeID: node, Groups: true,
					Expansion: []csi.PluginCapability_VolumeExpansion_Type{csi.PluginCapability_VolumeExpansion_ONLINE},
					Segments:  []map[string]string{{"topology.example.com/node": node}}, Controller: everyCapability()})
				container.start(t, driver.Address(), environment)
			})
		}
	})
}

func everyCapability() []csi.ControllerServiceCapability_RPC_Type {
	var all []csi.ControllerServiceCapability_RPC_Type
	for value := range csi.ControllerServiceCapability_RPC_Type_name {
		if value != 0 {
			all = append(all, csi.ControllerServiceCapability_RPC_Type(value))
		}
	}
	return all
}

// forked matches the refusal of a flag that only the fork has.
var forked = regexp.MustCompile(`unknown flag: --(enable-hostlocal-placement|tkgs-ha|use-service-for-placement-engine)`)

// start runs the container until it is healthy.
func (s sidecarContainer) start(t *testing.T, socket string, environment []string) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	program := filepath.Join(t.TempDir(), s.sidecar)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, program); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, program, s.arguments(socket)...)
	cmd.Env = environment
	cmd.WaitDelay = 10 * time.Second
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	address, log := listening(stderr)
	if address == "" {
		err := cmd.Wait()
		fork := strings.Contains(s.Image, "_vmware") && s.sidecar == "csi-provisioner"
		if fork && forked.MatchString(log) && cmd.ProcessState.ExitCode() == exitUsage {
			return
		}
		t.Fatalf("%q: %v\n%s", cmd.Args, err, log)
	}
	path := "/readyz"
	if s.sidecar == "livenessprobe" {
		path = "/healthz"
	}
	go func() { _, _ = io.Copy(io.Discard, stderr) }()
	kubetest.Eventually(t, s.Name+" is ready", func(ctx context.Context) error { return get(ctx, "http://"+address+path) })
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%q: %v", cmd.Args, err)
	}
}

// arguments returns the arguments of the manifest with the address of the test's driver, and a free port.
func (s sidecarContainer) arguments(socket string) []string {
	endpoint := "--http-endpoint=127.0.0.1:0"
	args := []string{"--csi-address=" + socket}
	for _, arg := range append(s.Command[min(1, len(s.Command)):], s.Args...) {
		switch name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "="); name {
		case "csi-address":
		case "metrics-address", "http-endpoint":
			endpoint = "--" + name + "=127.0.0.1:0"
		case "health-port":
			endpoint = "--health-port=0"
		default:
			args = append(args, arg)
		}
	}
	return append(args, endpoint)
}

var serving = regexp.MustCompile(`Serving (?:metrics and )?health.*"address": ?"([^"]+)"`)

// listening returns the address at which the process listens, or "" and what it has printed.
func listening(stderr io.Reader) (address, log string) {
	lines := bufio.NewScanner(stderr)
	for lines.Scan() {
		log += lines.Text() + "\n"
		if m := serving.FindStringSubmatch(lines.Text()); m != nil {
			return m[1], log
		}
	}
	if err := lines.Err(); err != nil {
		log += err.Error()
	}
	return "", log
}

// get returns an error unless the answer is 200.
func get(ctx context.Context, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if body, err := io.ReadAll(response.Body); err != nil || response.StatusCode != http.StatusOK {
		return errors.Join(fmt.Errorf("%s: %s", response.Status, body), err)
	}
	return nil
}
