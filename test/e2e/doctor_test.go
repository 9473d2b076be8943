// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// once runs the program until its end, with env besides that of the test.
func (e *env) once(env []string, subcommand string, args ...string) (stdout, stderr string, code int) {
	e.t.Helper()
	cmd := e.command(subcommand, args...)
	cmd.Env = slices.Concat(os.Environ(), []string{"POD_NAMESPACE=" + e.ns, "KUBECONFIG=", "NODE_NAME=", "POD_NAME="}, env)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		e.t.Fatal(err)
	}
	if strings.Contains(errs.String(), "DATA RACE") || strings.Contains(errs.String(), "goroutine ") {
		e.t.Errorf("a data race or a stack: %s", errs.String())
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// diagnosis is a report of doctor, by the names of its checks.
type diagnosis struct {
	t *testing.T
	doctor.Report
}

func (e *env) diagnose(code int, env []string, args ...string) diagnosis {
	e.t.Helper()
	stdout, stderr, got := e.once(env, "doctor", append([]string{"-o", "json"}, args...)...)
	d := diagnosis{t: e.t}
	if err := json.Unmarshal([]byte(stdout), &d.Report); err != nil {
		e.t.Fatalf("%v\n%s%s", err, stdout, stderr)
	}
	if got != code {
		e.t.Errorf("exit code %d, want %d\n%s%s", got, code, stdout, stderr)
	}
	for _, c := range d.Findings {
		if bad := c.Severity == finding.Warning || c.Severity == finding.Failing; c.Message == "" || bad != (c.Next != "") {
			e.t.Errorf("hint or message missing, or not needed: %+v", c)
		}
	}
	return d
}

// has fails the test unless there is a check of that name with a status, whose message or
// hint contains text.
func (d diagnosis) has(name string, s finding.Severity, text string) {
	d.t.Helper()
	for _, c := range d.Findings {
		if c.Topic == name && c.Severity == s && strings.Contains(c.Message+"\n"+c.Next, text) {
			return
		}
	}
	d.t.Errorf("no check %q is %s with %q; there are %+v", name, s, text, d.Findings)
}

var publishing = []csi.ControllerServiceCapability_RPC_Type{
	csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
	csi.ControllerServiceCapability_RPC_LIST_VOLUMES, csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
}

func (e *env) csiDriver(spec storagev1.CSIDriverSpec) {
	e.t.Helper()
	_, err := e.client.StorageV1().CSIDrivers().Create(e.t.Context(),
		&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: e.plugin.Name()}, Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
}

// TestDoctorOfAnInstallation looks at one that is well, as the ServiceAccount of the
// shipped manifests, beside the process that works.
func TestDoctorOfAnInstallation(t *testing.T) {
	t.Parallel()
	caps := append(slices.Clone(publishing), csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME)
	e := newEnv(t, csitest.Config{Controller: caps, Segments: []map[string]string{{}}}, 2)
	kubetest.InstallCRDs(t, e.cp)
	e.csiDriver(storagev1.CSIDriverSpec{StorageCapacity: ptr.To(true)})
	if _, err := e.client.CoreV1().Secrets(e.ns).Create(t.Context(),
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"k": "hidden-value"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	class := e.class(false, func(c *storagev1.StorageClass) {
		c.Parameters = map[string]string{"csi.storage.k8s.io/provisioner-secret-name": "s",
			"csi.storage.k8s.io/provisioner-secret-namespace": e.ns}
	})
	e.inForce("csi-provisioner", e.applyRBAC("provisioner*"))
	e.inForce("csi-provisioner", e.applyRBAC("capacity*"))
	p := e.run("provision", election...)
	e.leads(p, e.provisionerLease())
	kubeconfig, _, _ := e.as("csi-provisioner")
	env := []string{"NAMESPACE=" + e.ns}
	args := []string{"--kubeconfig", kubeconfig, "--controllers=provisioner,capacity", "--leader-election", "--capacity-ownerref-level=-1"}
	d := e.diagnose(0, env, args...)
	if d.Driver != e.plugin.Name() || finding.Count(d.Findings, finding.Failing) > 0 {
		t.Errorf("%+v", d)
	}
	d.has("socket", finding.OK, e.plugin.Address())
	d.has("driver", finding.OK, e.plugin.Name())
	d.has("capabilities", finding.OK, "GET_CAPACITY")
	d.has("settings", finding.OK, "valid")
	d.has("roles", finding.OK, "provisioner, capacity")
	d.has("environment", finding.OK, "")
	d.has("flags", finding.OK, "")
	d.has("api-server", finding.OK, "authenticated as system:serviceaccount:"+e.ns+":csi-provisioner")
	d.has("clock", finding.OK, "")
	d.has("api volumesnapshots", finding.OK, "")
	d.has("api volumeattributesclasses", finding.OK, "")
	for _, file := range []string{"provisioner", "provisioner-leader-election", "provisioner-attachments", "provisioner-topology",
		"provisioner-snapshots", "provisioner-volumeattributesclasses", "capacity", "capacity-topology"} {
		d.has("rbac "+file, finding.OK, "granted")
	}
	d.has("rbac provisioner-secrets "+e.ns+"/s", finding.OK, "granted")
	d.has("secret "+e.ns+"/s", finding.OK, "StorageClass "+class)
	d.has("lease "+e.provisionerLease(), finding.OK, "held by "+p.pod)
	d.has("storageclasses", finding.OK, class)
	d.has("nodes", finding.OK, "registered on 2 of")
	d.has("topology keys", finding.OK, e.plugin.Name()+"/node")
	// What only this command would read is not granted, and said to be unknown.
	d.has("sidecars", finding.Unknown, "permission denied (list pods). Only this command needs the permission.")
	d.has("csidriver", finding.Unknown, "permission denied (get csidrivers.storage.k8s.io).")

	fromElsewhere := slices.Concat(args, []string{"--kubeconfig", e.cp.Kubeconfig(), "--as", e.ns + "/csi-provisioner"})
	admin := e.diagnose(0, []string{"POD_NAMESPACE="}, fromElsewhere...)
	admin.has("rbac provisioner", finding.OK, "granted")
	admin.has("sidecars", finding.OK, "none in namespace")
	admin.has("csidriver attachRequired", finding.OK, "true")
	admin.has("csidriver storageCapacity", finding.OK, "true")
	sidecar := e.diagnose(3, env, slices.Concat(args, []string{"--kubeconfig", e.user(clusterRules, namespaceRules)})...)
	sidecar.has("rbac provisioner", finding.OK, "granted") // with update instead of patch
	sidecar.has("rbac provisioner-snapshots", finding.OK, "granted")
	stranger := e.diagnose(3, env, slices.Concat(args, []string{"--kubeconfig", e.cp.Kubeconfig(), "--as", e.ns + "/stranger"})...)
	stranger.has("rbac provisioner", finding.Failing, "get,list,watch,create,patch,delete persistentvolumes")
	stranger.has("rbac provisioner", finding.Failing, "--print-rbac")
	stranger.has("rbac provisioner-snapshots", finding.Warning, "without it")
	stranger.has("rbac provisioner-secrets "+e.ns+"/s", finding.Failing, "get secrets s in "+e.ns)

	text, stderr, code := e.once(env, "doctor", args...)
	if code != 0 || !strings.Contains(text, " 0 failing") || strings.Contains(text+stderr, "hidden-value") {
		t.Errorf("%d: %s%s", code, text, stderr)
	}
}

// TestDoctorFindsWhatIsWrong has everything wrong at once that can be.
func TestDoctorFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{Controller: publishing, Segments: []map[string]string{{}}}, 2)
	e.csiDriver(storagev1.CSIDriverSpec{AttachRequired: ptr.To(false), StorageCapacity: ptr.To(true),
		VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral}})
	unlabelled := kubetest.NodeSpec{Name: e.ns + "-other", Driver: e.plugin.Name(), NodeID: "other", TopologyKeys: []string{"other"}}
	if err := kubetest.CreateNode(t.Context(), e.client, unlabelled); err != nil {
		t.Fatal(err)
	}
	e.nodes = append(e.nodes, unlabelled.Name)
	class := e.class(false, func(c *storagev1.StorageClass) {
		c.Parameters = map[string]string{"csi.storage.k8s.io/provisioner-secret-name": "gone",
			"csi.storage.k8s.io/provisioner-secret-namespace": e.ns}
	})
	broken := e.class(false, func(c *storagev1.StorageClass) {
		c.Parameters = map[string]string{"csi.storage.k8s.io/provisioner-secret-name": "alone"}
	})
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "old"}, Spec: corev1.PodSpec{NodeName: "none", Containers: []corev1.Container{
		{Name: "new", Image: "storage-controller:dev", Args: []string{"all"}},
		{Name: "a", Image: "csi-attacher:v4.8.0", Args: []string{"--leader-election=false"}},
		{Name: "p", Image: "sig-storage/csi-provisioner:v5.2.0", Args: []string{"--leader-election"}},
	}}}
	if _, err := e.client.CoreV1().Pods(e.ns).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	other := kubetest.Namespace(t, e.cp)
	now := metav1.NowMicro()
	for ns, renewed := range map[string]metav1.MicroTime{e.ns: now, other: now} {
		for name, renewed := range map[string]metav1.MicroTime{e.provisionerLease(): renewed,
			e.attacherLease(): {Time: now.Add(-1000 * 3600e9)}} {
			_, err := e.client.CoordinationV1().Leases(ns).Create(t.Context(),
				&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: coordinationv1.LeaseSpec{
					HolderIdentity: ptr.To("holder-in-" + ns), LeaseDurationSeconds: ptr.To[int32](3600), RenewTime: &renewed,
				}}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	names := []string{"custom", "nodecontroller-leader-" + e.provisionerLease()} // of which the process has the first
	for _, name := range names {
		_, err := e.client.CoordinationV1().Leases(e.ns).Create(t.Context(),
			&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: coordinationv1.LeaseSpec{
				HolderIdentity: ptr.To("holder-of-" + name), LeaseDurationSeconds: ptr.To[int32](3600), RenewTime: &now,
			}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	d := e.diagnose(3, []string{"STORAGE_CONTROLLER_WORKER_THREAD=3", "STORAGE_CONTROLLER_SERVICE_HOST=10.0.0.1"},
		"--leader-election", "--feature-gates=HonorPVReclaimPolicy=true", "--logtostderr", "--otlp-sampling-ratio=0.5",
		"--capacity-poll-interval=1m", "--kube-api-qps=1", "--kube-api-burst=-1", "--leader-election-id=custom")
	d.has("settings", finding.Failing, "--kube-api-burst")
	d.has("roles", finding.Unknown, "GET_CAPACITY")
	d.has("environment", finding.Warning, "STORAGE_CONTROLLER_WORKER_THREAD")
	d.has("flags", finding.OK, "HonorPVReclaimPolicy")
	d.has("flags", finding.OK, "--logtostderr")
	d.has("flags", finding.Warning, "otlp-sampling-ratio (flag)")
	d.has("flags", finding.Warning, "capacity.capacity-poll-interval (flag) has no effect: the role capacity does not run")
	d.has("lease "+e.provisionerLease(), finding.Failing, "holder-in-"+other)
	d.has("lease "+e.attacherLease(), finding.Warning, "expired")
	d.has("lease custom", finding.Failing, "holder-of-"+names[1])
	d.has("sidecars", finding.Failing, "csi-attacher")
	d.has("sidecars", finding.Failing, "csi-provisioner")
	d.has("csidriver attachRequired", finding.Failing, "PUBLISH_UNPUBLISH_VOLUME")
	d.has("csidriver storageCapacity", finding.Failing, "GET_CAPACITY")
	d.has("csidriver volumeLifecycleModes", finding.Failing, "Persistent")
	d.has("secret "+e.ns+"/gone", finding.Warning, "StorageClass "+class)
	d.has("storageclass "+broken, finding.Failing, "both or none")
	d.has("topology keys", finding.Warning, "[other] on "+unlabelled.Name)
	for _, c := range d.Findings {
		if strings.Contains(c.Message, "SERVICE_HOST") {
			t.Errorf("that is of Kubernetes: %+v", c)
		}
	}
}

// TestDoctorWithoutTheDriver finds the cause of an unreachable driver, and continues
// without it.
func TestDoctorWithoutTheDriver(t *testing.T) {
	t.Parallel()
	e := newEnv(t, csitest.Config{Controller: publishing}, 0)
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	d := e.diagnose(3, nil, "--csi-address="+filepath.Join(dir, "none"))
	d.has("socket", finding.Failing, "check that the driver is running")
	d.has("storageclasses", finding.Unknown, "name of the driver")
	e.diagnose(3, nil, "--csi-address="+file).has("socket", finding.Failing, "not a socket")

	e.plugin.Always("Probe", csitest.Hang())
	d = e.diagnose(3, nil, "--timeout=1s")
	d.has("socket", finding.OK, "accepts")
	d.has("driver", finding.Failing, "not ready within --timeout=1s")
	d.has("driver", finding.Failing, "the driver does not answer")
	e.plugin.Always("Probe", csitest.Fail(codes.Internal, "array lost"))
	d = e.diagnose(3, nil, "--timeout=1s")
	d.has("driver", finding.Failing, "Internal desc = array lost")
	d.has("driver", finding.Failing, "the driver answers with an error")
	e.plugin.Always("Probe", nil)

	named := []string{"doctor", "-o", "json", "--kubeconfig", e.cp.Kubeconfig(), "--driver-name", e.plugin.Name()}
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, named...)
	cmd.Env = append(os.Environ(), "KUBECONFIG=", "POD_NAMESPACE="+e.ns)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	d = diagnosis{t: t}
	if err := json.Unmarshal(out, &d.Report); err != nil {
		t.Fatal(err)
	}
	d.has("socket", finding.Unknown, "--driver-name")
	d.has("csidriver", finding.Warning, "no CSIDriver object")
	d.has("storageclasses", finding.Warning, e.plugin.Name())
	d.has("rbac attacher", finding.OK, "granted")

	for _, c := range []struct {
		code int
		text string
		args []string
	}{
		{1, "neither the driver nor the API server",
			[]string{"--csi-address=" + filepath.Join(dir, "none"), "--kubeconfig=" + filepath.Join(dir, "none")}},
		{2, "must be text or json", []string{"-o", "yaml"}},
		{2, "unknown flag", []string{"--no-such-flag"}},
	} {
		if _, stderr, code := e.once(nil, "doctor", c.args...); code != c.code || !strings.Contains(stderr, c.text) {
			t.Errorf("%v: exit code %d, want %d: %s", c.args, code, c.code, stderr)
		}
	}
	if d := e.diagnose(3, nil, "--kubeconfig="+filepath.Join(dir, "none")); !d.Reached {
		t.Error("the driver was reached")
	}
}
