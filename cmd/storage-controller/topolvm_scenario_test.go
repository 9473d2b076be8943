// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/cert"
	"k8s.io/component-helpers/auth/rbac/validation"
	k8syaml "sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

// topolvmReleases are those whose rendered chart is in testdata: with webhooks; with USE_LEGACY, without the cleanup of nodes and
// without snapshots; with the default values.
var topolvmReleases = []string{"0.35", "0.39", "0.41"}

// deploymentOf returns the Deployment of a manifest.
func deploymentOf(t *testing.T, manifest string) *appsv1.Deployment {
	t.Helper()
	for doc := range strings.SplitSeq(manifest, "---\n") {
		var d appsv1.Deployment
		if err := k8syaml.Unmarshal([]byte(doc), &d); err == nil && d.Kind == "Deployment" {
			return &d
		}
	}
	t.Fatal("no Deployment")
	return nil
}

// topolvmChart returns the rendered chart of a release.
func topolvmChart(t *testing.T, release string) string {
	t.Helper()
	text, err := os.ReadFile(migrateTestdata + "topolvm-" + release + ".yaml")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestTopolvmScenario(t *testing.T) {
	t.Run("082_arguments_of_the_chart", func(t *testing.T) {
		command, _, err := newRoot(topolvmController).Find([]string{"topolvm"})
		if err != nil {
			t.Fatal(err)
		}
		for name, value := range map[string]string{"metrics-bind-address": ":8080", "health-probe-bind-address": ":8081",
			"csi-socket": "/run/topolvm/csi-topolvm.sock", "enable-webhooks": "true", "driver-health-endpoint": ""} {
			if f := command.Flags().Lookup(name); f.DefValue != value {
				t.Errorf("--%s is %s, want %s", name, f.DefValue, value)
			}
		}
		for _, release := range topolvmReleases {
			t.Run(release, func(t *testing.T) { runsChart(t, deploymentOf(t, topolvmChart(t, release)).Spec.Template.Spec) })
		}
	})
	t.Run("088_migrate", func(t *testing.T) {
		for _, release := range topolvmReleases {
			t.Run(release, func(t *testing.T) { migratesChart(t, topolvmChart(t, release)) })
		}
	})
}

// runsChart starts topolvm-controller and csi-provisioner of a pod under these names, with their arguments and environment, and
// creates a volume. Only the addresses and the directories differ from the manifest.
func runsChart(t *testing.T, pod corev1.PodSpec) {
	cp := kubetest.Get(t)
	kubetest.InstallCRDs(t, cp)
	_, err := cp.Client().CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "topolvm-system"}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "topolvm") // the name of the directory of t may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	chain, key, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string][]byte{"tls.crt": chain, "tls.key": key} {
		if err := os.WriteFile(filepath.Join(dir, file), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	socket, metrics, health := filepath.Join(dir, "csi.sock"), freeAddress(t), freeAddress(t)
	here := strings.NewReplacer("=/certs", "="+dir, "/run/topolvm/csi-topolvm.sock", socket, "=:9809", "=127.0.0.1:0",
		"--capacity-ownerref-level=2", "--capacity-ownerref-level=-1") // no pod has this name
	environment := []string{"KUBECONFIG=" + cp.Kubeconfig(), "PATH=" + os.Getenv("PATH"), "POD_NAMESPACE=topolvm-system",
		"STORAGE_CONTROLLER_CSI_SOCKET=" + socket, "STORAGE_CONTROLLER_METRICS_BIND_ADDRESS=" + metrics,
		"STORAGE_CONTROLLER_HEALTH_PROBE_BIND_ADDRESS=" + health, "STORAGE_CONTROLLER_WEBHOOK_ADDR=127.0.0.1:0"}
	driver := topolvm.Driver
	for _, c := range pod.Containers[:2] {
		own := []string{"POD_NAME=pod", "NAMESPACE=topolvm-system"}
		if c.Name == topolvmController {
			own = environment
			for _, e := range c.Env {
				driver = topolvm.LegacyDriver // USE_LEGACY is the only one
				own = append(own, e.Name+"="+e.Value)
			}
			topolvmtest.Install(t, cp.Client(), driver)
		}
		startContainer(t, here, c, append(slices.Clone(environment[:3]), own...))
	}
	kubetest.Eventually(t, "metrics and readiness", func(ctx context.Context) error {
		if err := get(ctx, "http://"+health+"/readyz"); err != nil {
			return err
		}
		return get(ctx, "http://"+metrics+"/metrics")
	})
	ns := kubetest.Namespace(t, cp)
	node := topolvmtest.Start(t, cp.Config(), topolvmtest.Config{Driver: driver, Name: ns + "-a", Classes: topolvmtest.Classes()})
	mode, class := storagev1.VolumeBindingWaitForFirstConsumer, ns
	_, err = cp.Client().StorageV1().StorageClasses().Create(t.Context(), &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: class}, Provisioner: driver, VolumeBindingMode: &mode,
		Parameters: map[string]string{driver + "/device-class": "thin"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	claim, err := cp.Client().CoreV1().PersistentVolumeClaims(ns).Create(t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "data", Annotations: map[string]string{
			"volume.kubernetes.io/selected-node": node.Name(), "volume.kubernetes.io/storage-provisioner": driver,
		}},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the claim has a volume", func(ctx context.Context) error {
		_, err := cp.Client().CoreV1().PersistentVolumes().Get(ctx, "pvc-"+string(claim.UID), metav1.GetOptions{})
		return err
	})
	if n := len(node.Volumes()); n != 1 {
		t.Errorf("%d LVM volumes", n)
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// startContainer runs the command of a container under its name, until the end of the test.
func startContainer(t *testing.T, here *strings.Replacer, c corev1.Container, environment []string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), self)
	cmd.Args, cmd.Env = slices.Clone(c.Command), environment
	for i, arg := range cmd.Args {
		cmd.Args[i] = here.Replace(arg)
	}
	var log bytes.Buffer
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Errorf("%q: %v\n%s", cmd.Args, err, &log)
		}
	})
}

// migratesChart checks the pod, the report and the permissions of a migrated chart.
func migratesChart(t *testing.T, manifest string) {
	argv := []string{"storage-controller", "migrate", "-f", "-", "--image=example/storage-controller:v1"}
	_, migrated, _ := runWithInput(t, []byte(manifest), argv...)
	_, diff, report := runWithInput(t, []byte(manifest), append(argv, "--diff")...)
	before, pod := deploymentOf(t, manifest).Spec.Template.Spec, deploymentOf(t, migrated).Spec.Template.Spec
	if len(pod.Containers) != 1 || pod.Containers[0].Args[0] != "topolvm" {
		t.Fatalf("the containers are %v", pod.Containers)
	}
	c, old := pod.Containers[0], before.Containers[0]
	ports := slices.Clone(old.Ports)
	for _, sidecar := range before.Containers[1:] { // at their own addresses
		ports = append(ports, sidecar.Ports...)
	}
	if len(old.Ports) != 4 || fmt.Sprint(c.Ports) != fmt.Sprint(ports) || fmt.Sprint(c.LivenessProbe) != fmt.Sprint(old.LivenessProbe) ||
		fmt.Sprint(c.ReadinessProbe) != fmt.Sprint(old.ReadinessProbe) || fmt.Sprint(c.VolumeMounts) != fmt.Sprint(old.VolumeMounts) {
		t.Errorf("ports %v, probes %v and %v, mounts %v", c.Ports, c.LivenessProbe, c.ReadinessProbe, c.VolumeMounts)
	}
	for _, e := range slices.Concat(old.Env, before.Containers[1].Env) {
		if !slices.ContainsFunc(c.Env, func(have corev1.EnvVar) bool { return have.Name == e.Name }) {
			t.Errorf("the environment is %v, without %s", c.Env, e.Name)
		}
	}
	for _, old := range before.Containers {
		for _, flag := range old.Command[1:] {
			if slices.Contains(c.Args, flag) {
				continue
			}
			if !strings.Contains(diff, "\n-            - "+flag+"\n") || !strings.Contains(report, "    "+flag+" ") {
				t.Errorf("%s of %s: not in the diff, or not in the report:\n%s\n%s", flag, old.Name, diff, report)
			}
		}
	}
	_, permissions, _ := runWithInput(t, []byte(manifest), append(argv, "--print-rbac")...)
	containsPermissions(t, permissions+"---\n"+manifest, len(old.Env) > 0, len(before.Containers) > 4,
		!slices.Contains(c.Args, "--skip-node-finalize"))
}

// containsPermissions checks that manifests grant what the command topolvm needs, except those of Secrets.
func containsPermissions(t *testing.T, manifests string, legacy, snapshots, cleanup bool) {
	t.Helper()
	granted := map[rbac.Access]bool{}
	for doc := range strings.SplitSeq(manifests, "---\n") {
		var role rbacv1.ClusterRole
		if err := k8syaml.Unmarshal([]byte(doc), &role); err == nil {
			for _, rule := range role.Rules {
				for _, r := range validation.BreakdownRule(rule) {
					granted[rbac.Access{Verb: r.Verbs[0], Group: r.APIGroups[0], Resource: r.Resources[0]}] = true
				}
			}
		}
	}
	directories := []string{"topolvm", "provisioner", "provisioner-topology", "provisioner-snapshots", "provisioner-leader-election",
		"capacity", "capacity-owner", "capacity-owner-deployment", "capacity-topology", "resizer", "resizer-leader-election",
		"nodecontroller", "nodecontroller-leader-election", "nodecontroller-node-finalizer", "nodecontroller-pvc-strip",
		"nodecontroller-resize-nudge"}
	if snapshots {
		directories = append(directories, "snapshotter", "snapshotter-leader-election")
	}
	if cleanup {
		directories = append(directories, "nodecontroller-cleanup")
	}
	other := topolvm.LegacyDriver
	if legacy {
		other = topolvm.Driver
	}
	for _, directory := range directories {
		for _, a := range rbac.Of(directory, "") {
			update := rbac.Access{Verb: "update", Resource: "persistentvolumeclaims"} // in place of patch
			isPatch := a == rbac.Access{Verb: "patch", Resource: "persistentvolumeclaims"}
			if a.Group != other && !granted[a] && !(isPatch && granted[update]) {
				t.Errorf("%s of %s is not granted", a, directory)
			}
		}
	}
}
