// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/topolvm"
	"github.com/storage-controller/storage-controller/topolvm/topolvmtest"
)

// The flags of the controller pod of TopoLVM, as its chart has them, without the owner of capacity, which is a Deployment, and without
// a limit of requests that the sidecars could reach.
const (
	topolvmFlags = " --kubeconfig={kubeconfig} --csi-socket={socket} --leader-election-namespace=" + namespace +
		" --metrics-bind-address=127.0.0.1:0 --health-probe-bind-address=127.0.0.1:0"
	topolvmCapacity = " --capacity-ownerref-level=-1"
	sidecarFlags    = " --kubeconfig={kubeconfig} --csi-address={socket} --leader-election --leader-election-namespace=" + namespace +
		" --http-endpoint=127.0.0.1:0 --kube-api-qps=100000 --kube-api-burst=100000"
)

// topolvmCommand returns the command line of the whole pod.
func topolvmCommand(program string) string {
	return program + " topolvm" + topolvmFlags + topolvmCapacity + " --driver-health-endpoint=127.0.0.1:0"
}

// BenchmarkTopolvm runs the life of a StatefulSet with volumes of TopoLVM on separate processes and on the command topolvm.
// With UPDATE=1 it writes the table of docs/topolvm.md. No source of topolvm-controller and livenessprobe can be built here:
// the command topolvm under the name topolvm-controller serves the driver, and livenessprobe is missing.
//
//	KUBETEST=real UPDATE=1 go test -run '^$' -bench Topolvm -benchtime 1x -timeout 1h ./test/bench
func BenchmarkTopolvm(t *testing.B) {
	kubetest.NeedReal(t)
	paths, err := kubetest.BuildReference(t.Context(), os.Stderr, "csi-provisioner", "csi-resizer", "csi-snapshotter")
	if err != nil {
		t.Fatal(err)
	}
	program, err := build(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	versions, err := sideOf("", "", append(paths, program)...)
	if err != nil {
		t.Fatal(err)
	}
	kubernetes, err := kubetest.SelectedVersion()
	if err != nil {
		t.Fatal(err)
	}
	separate := func(dir string) sidecars {
		link := filepath.Join(dir, "topolvm-controller")
		if err := os.Symlink(program, link); err != nil {
			t.Fatal(err)
		}
		return sidecars{link + topolvmFlags + " --enable-webhooks=false",
			paths[0] + sidecarFlags + " --feature-gates=Topology=true --enable-capacity" + topolvmCapacity,
			paths[1] + sidecarFlags, paths[2] + sidecarFlags}
	}
	var loads [2][2]load
	t.Run("separate", func(t *testing.B) {
		b := newTopolvmBench(t, 50)
		loads[0] = b.run(separate(b.dir))
	})
	t.Run("topolvm", func(t *testing.B) { loads[1] = newTopolvmBench(t, 50).run(sidecars{topolvmCommand(program)}) })
	if t.Failed() {
		return
	}
	table := fmt.Sprintf("%s\n%s. %s, Kubernetes %s, %s.\n", topolvmTable(loads), versions.Versions,
		time.Now().UTC().Format(time.DateOnly), kubernetes.Kubernetes, machine())
	fmt.Fprintln(os.Stderr, table)
	if os.Getenv("UPDATE") == "" {
		return
	}
	page := filepath.Join("..", "..", "docs", "topolvm.md")
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	replaced, err := replacePart(string(text), "load", table)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(page, []byte(replaced), 0o644); err != nil {
		t.Fatal(err)
	}
}

// The processes whose load is measured.
const (
	ofSidecars = iota // csi-provisioner, csi-resizer and csi-snapshotter
	ofProgram         // storage-controller
)

var topolvmNames = [2]string{"sidecars", "storage-controller"}

// load is what processes cost the API server and the machine.
type load struct {
	processes, connections int
	watches                map[string]int // by resource
	resident               [2]int64       // bytes: idle before the volumes exist, and after they were deleted
	idle                   int            // requests in [topolvmIdle], without watches
	phases                 []topolvmPhase
}

// topolvmPhase counts the requests of a phase, without watches and Leases.
type topolvmPhase struct {
	name     string
	n        int            // volumes, or 1
	requests map[string]int // by verb and resource
	writes   int
}

// topolvmIdle is the time in which nothing happens.
const topolvmIdle = 15 * time.Second

// topolvmBench is a cluster with TopoLVM.
type topolvmBench struct {
	*bench
	t       testing.TB
	nodes   []*topolvmtest.Node
	volumes int
	loads   [2]load
}

// newTopolvmBench starts a control plane with five nodes until the end of t.
func newTopolvmBench(t testing.TB, volumes int) *topolvmBench {
	t.Helper()
	set, err := setUp(t.Context(), options{driverName: topolvm.Driver, phases: []string{"snapshot"}},
		kubetest.Config{ControllerManager: true, Scheduler: true, Audit: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(set.tearDown)
	b := &topolvmBench{bench: set, t: t, volumes: volumes, loads: [2]load{{watches: map[string]int{}}, {watches: map[string]int{}}}}
	b.socket = filepath.Join(b.dir, "csi.sock")
	topolvmtest.InstallDefinition(t, b.client, b.driver)
	ctx := t.Context()
	_, err = b.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		metav1.CreateOptions{})
	b.must(err)
	_, err = b.client.StorageV1().CSIDrivers().Create(ctx, &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: b.driver},
		Spec: storagev1.CSIDriverSpec{AttachRequired: ptr.To(false), StorageCapacity: ptr.To(true)}}, metav1.CreateOptions{})
	b.must(err)
	_, err = b.client.StorageV1().StorageClasses().Create(ctx, &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: "bench"}, Provisioner: b.driver, AllowVolumeExpansion: ptr.To(true),
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
		Parameters:        map[string]string{b.driver + "/device-class": "thin"}}, metav1.CreateOptions{})
	b.must(err)
	b.must(b.prepareChanges(ctx))
	for i := range 5 {
		n := topolvmtest.Start(t, b.cp.Config(), topolvmtest.Config{Driver: b.driver, Name: node(i), Classes: topolvmtest.Classes()})
		b.nodes = append(b.nodes, n)
		_, err = b.client.CoreV1().Nodes().PatchStatus(ctx, n.Name(),
			[]byte(`{"status":{"allocatable":{"cpu":"64","memory":"256Gi","pods":"500"}}}`))
		b.must(err)
	}
	return b
}

func (b *topolvmBench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatalf("%v%s", err, b.tails())
	}
}

// await waits until check succeeds.
func (b *topolvmBench) await(what string, check func(ctx context.Context) error) {
	b.t.Helper()
	if err := kubetest.Await(b.t.Context(), check); err != nil {
		b.must(fmt.Errorf("waiting until %s: %w", what, err))
	}
}

// run measures the life of the volumes with the processes of commands, the storage-controller first.
func (b *topolvmBench) run(commands sidecars) [2]load {
	b.t.Helper()
	begin := b.begin()
	stop, err := b.start(b.t.Context(), commands, "NAMESPACE="+namespace, "POD_NAMESPACE="+namespace, "POD_NAME=bench")
	b.must(err)
	defer stop()
	b.phase("start, in total", 1, func() {}, b.started)
	b.idle(begin)
	b.story()
	b.must(pause(b.t.Context(), idle))
	b.memories(1)
	return b.loads
}

// story is the life of a StatefulSet.
func (b *topolvmBench) story() {
	b.t.Helper()
	b.phase("provision", b.volumes, func() { b.statefulSet() }, b.running)
	b.phase("expand", b.volumes, func() {
		for _, pvc := range b.claims() {
			_, err := b.client.CoreV1().PersistentVolumeClaims(namespace).Patch(b.t.Context(), pvc.Name, types.MergePatchType,
				[]byte(`{"spec":{"resources":{"requests":{"storage":"2Gi"}}}}`), metav1.PatchOptions{})
			b.must(err)
		}
	}, b.expanded)
	b.phase("snapshot", b.volumes, func() {
		for _, pv := range b.persistentVolumes() {
			_, err := b.dynamic().Resource(contents).Create(b.t.Context(), content(b.driver, pv.Spec.ClaimRef.Name, &pv),
				metav1.CreateOptions{})
			b.must(err)
		}
	}, b.snapshots(b.volumes))
	b.phase("clone", b.volumes, b.clone, b.bound(2*b.volumes))
	b.phase("delete the snapshot", b.volumes, func() {
		for _, a := range b.changes(newTimes(), func(i int) string { return fmt.Sprintf("data-web-%d", i) }) {
			for i := range b.volumes {
				if a.name == "delete-snapshot" {
					b.must(a.do(b.t.Context(), i))
				}
			}
		}
	}, b.snapshots(0))
	lost := b.nodes[0]
	b.phase("Node deleted, per volume there", len(lost.Volumes()), func() { b.deleteNode(lost) }, func(ctx context.Context) error {
		_, err := b.client.CoreV1().Nodes().Get(ctx, lost.Name(), metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("the Node exists: %w", err)
		}
		return b.running(ctx)
	})
	b.phase("delete", len(b.claims()), func() {
		b.must(b.client.AppsV1().StatefulSets(namespace).Delete(b.t.Context(), "web",
			metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationForeground)}))
		b.must(b.client.CoreV1().PersistentVolumeClaims(namespace).DeleteCollection(b.t.Context(), metav1.DeleteOptions{},
			metav1.ListOptions{}))
	}, func(context.Context) error {
		if left := len(b.persistentVolumes()); left > 0 {
			return fmt.Errorf("%d PersistentVolumes", left)
		}
		return nil
	})
}

// phase has something done for n volumes, waits for its end, and counts the requests of the processes.
func (b *topolvmBench) phase(name string, n int, do func(), done func(ctx context.Context) error) {
	b.t.Helper()
	begin := b.begin()
	do()
	b.await(name+" is complete", done)
	b.must(pause(b.t.Context(), settle))
	phases := [2]topolvmPhase{}
	for i := range phases {
		phases[i] = topolvmPhase{name: name, n: max(1, n), requests: map[string]int{}}
	}
	b.records(begin, func(i int, r kubetest.AuditEvent) {
		if r.Verb == "watch" || r.Object.Resource == "leases" || r.Object.Resource == "" {
			return
		}
		phases[i].requests[r.Verb+" "+r.Resource()]++
		if r.IsWrite() {
			phases[i].writes++
		}
	})
	for i, p := range phases {
		b.loads[i].phases = append(b.loads[i].phases, p)
		if len(p.requests) > 0 {
			say("%-30s %5.1f s, %s: %s", name, time.Since(begin.at).Seconds(), topolvmNames[i], per(p.requests, p.n))
		}
	}
}

// records calls do for each request of the processes since begin.
func (b *topolvmBench) records(begin sample, do func(process int, r kubetest.AuditEvent)) {
	b.t.Helper()
	records, err := b.cp.AuditSince(begin.audit, "")
	b.must(err)
	for _, r := range records {
		switch {
		case strings.HasPrefix(r.UserAgent, "csi-"):
			do(ofSidecars, r)
		case strings.HasPrefix(r.UserAgent, "storage-controller/"):
			do(ofProgram, r)
		}
	}
}

// idle measures the processes, which have started since begin, while nothing happens.
func (b *topolvmBench) idle(begin sample) {
	b.t.Helper()
	quiet := b.begin()
	b.must(pause(b.t.Context(), topolvmIdle))
	b.records(quiet, func(i int, r kubetest.AuditEvent) {
		if r.Verb != "watch" {
			b.loads[i].idle++
		}
	})
	b.records(begin, func(i int, r kubetest.AuditEvent) {
		switch {
		case r.Verb == "watch" && r.Stage == "ResponseStarted":
			b.loads[i].watches[r.Resource()]++
		case r.Verb == "watch":
			b.loads[i].watches[r.Resource()]--
		}
	})
	address, err := url.Parse(b.cp.Config().Host)
	b.must(err)
	port, err := strconv.Atoi(address.Port())
	b.must(err)
	for n, pid := range b.pids {
		open, err := connections(pid, port)
		b.must(err)
		l := &b.loads[processOf(n)]
		l.connections += open
		l.processes++
	}
	b.memories(0)
}

// processOf returns whose process has the number n: the storage-controller is the first.
func processOf(n int) int {
	if n == 0 {
		return ofProgram
	}
	return ofSidecars
}

// memories measures the memory of the processes.
func (b *topolvmBench) memories(when int) {
	for n, pid := range b.pids {
		b.loads[processOf(n)].resident[when] += field(fmt.Sprintf("/proc/%d/status", pid), "VmRSS:") * 1024
	}
}

// connections counts the TCP connections of a process to a port.
func connections(pid, port int) (n int, err error) {
	owned := map[string]bool{} // by inode
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		return 0, err
	}
	for _, f := range files {
		target, _ := os.Readlink(f) // a file may be closed meanwhile
		owned[strings.TrimSuffix(strings.TrimPrefix(target, "socket:["), "]")] = true
	}
	for _, table := range []string{"tcp", "tcp6"} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(data)) {
			// The third field is the remote address, the fourth the state, of which 01 is established, and the tenth the inode.
			f := strings.Fields(line)
			if len(f) > 9 && strings.HasSuffix(f[2], fmt.Sprintf(":%04X", port)) && f[3] == "01" && owned[f[9]] {
				n++
			}
		}
	}
	return n, nil
}

// statefulSet creates a StatefulSet whose pods have a claim each.
func (b *topolvmBench) statefulSet() {
	labels := map[string]string{"app": "web"}
	template := claim("data")
	// By the requests, the scheduler prefers an empty node.
	requests := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}
	_, err := b.client.AppsV1().StatefulSets(namespace).Create(b.t.Context(), &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: appsv1.StatefulSetSpec{
			Replicas: ptr.To(int32(b.volumes)), ServiceName: "web", Selector: &metav1.LabelSelector{MatchLabels: labels},
			PodManagementPolicy: appsv1.ParallelPodManagement, VolumeClaimTemplates: []corev1.PersistentVolumeClaim{*template},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					TerminationGracePeriodSeconds: ptr.To[int64](0),
					Containers: []corev1.Container{{Name: "c", Image: "none", Resources: corev1.ResourceRequirements{Requests: requests},
						VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}}},
				},
			},
		},
	}, metav1.CreateOptions{})
	b.must(err)
}

// started returns nil once each process works: a claim gets a volume and loses it, and each role has its Lease.
func (b *topolvmBench) started(ctx context.Context) error {
	leases, err := b.client.CoordinationV1().Leases(namespace).List(ctx, metav1.ListOptions{})
	if err != nil || len(leases.Items) < 4 {
		return fmt.Errorf("%d Leases: %w", len(leases.Items), err)
	}
	capacities, err := b.client.StorageV1().CSIStorageCapacities(namespace).List(ctx, metav1.ListOptions{})
	if err != nil || len(capacities.Items) < len(b.nodes) {
		return fmt.Errorf("%d capacities: %w", len(capacities.Items), err)
	}
	return nil
}

// running returns nil once each pod has a node and a volume there.
func (b *topolvmBench) running(ctx context.Context) error {
	pods, err := b.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	n := 0
	for _, p := range pods.Items {
		if p.Spec.NodeName != "" && p.DeletionTimestamp == nil {
			n++
		}
	}
	if n != b.volumes {
		return fmt.Errorf("%d of %d pods have a node", n, b.volumes)
	}
	return nil
}

// expanded returns nil once the kubelets would expand the file systems.
func (b *topolvmBench) expanded(context.Context) error {
	n := 0
	for _, pvc := range b.claims() {
		if slices.ContainsFunc(pvc.Status.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool {
			return c.Type == corev1.PersistentVolumeClaimFileSystemResizePending && c.Status == corev1.ConditionTrue
		}) {
			n++
		}
	}
	if n != b.volumes {
		return fmt.Errorf("%d of %d claims wait for the kubelet", n, b.volumes)
	}
	return nil
}

// clone creates a copy of each claim on its node.
func (b *topolvmBench) clone() {
	for _, source := range b.claims() {
		pvc := claim("clone-of-" + source.Name)
		pvc.Annotations = map[string]string{annSelectedNode: source.Annotations[annSelectedNode]}
		pvc.Spec.Resources = source.Spec.Resources
		pvc.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: source.Name}
		_, err := b.client.CoreV1().PersistentVolumeClaims(namespace).Create(b.t.Context(), pvc, metav1.CreateOptions{})
		b.must(err)
	}
}

const annSelectedNode = "volume.kubernetes.io/selected-node"

// bound returns nil once n claims are bound.
func (b *topolvmBench) bound(n int) func(context.Context) error {
	return func(context.Context) error {
		bound := 0
		for _, pvc := range b.claims() {
			if pvc.Status.Phase == corev1.ClaimBound {
				bound++
			}
		}
		if bound != n {
			return fmt.Errorf("%d of %d claims are bound", bound, n)
		}
		return nil
	}
}

// snapshots returns nil once there are n snapshots, all of them ready.
func (b *topolvmBench) snapshots(n int) func(context.Context) error {
	return func(ctx context.Context) error {
		list, err := b.dynamic().Resource(contents).List(ctx, metav1.ListOptions{})
		if err != nil || len(list.Items) != n {
			return fmt.Errorf("%d snapshots instead of %d: %w", len(list.Items), n, err)
		}
		for _, s := range list.Items {
			if ready, _, _ := unstructured.NestedBool(s.Object, "status", "readyToUse"); !ready {
				return fmt.Errorf("%s is not ready", s.GetName())
			}
		}
		return nil
	}
}

// deleteNode drains a Node whose machine does not run, and deletes it.
func (b *topolvmBench) deleteNode(n *topolvmtest.Node) {
	ctx, nodes := b.t.Context(), b.client.CoreV1().Nodes()
	n.Stop()
	_, err := nodes.Patch(ctx, n.Name(), types.MergePatchType, []byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{})
	b.must(err)
	b.must(b.client.CoreV1().Pods(namespace).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)},
		metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.Name()}))
	b.must(nodes.Delete(ctx, n.Name(), metav1.DeleteOptions{}))
	b.must(b.client.StorageV1().CSINodes().Delete(ctx, n.Name(), metav1.DeleteOptions{}))
}

func (b *topolvmBench) claims() []corev1.PersistentVolumeClaim {
	list, err := b.client.CoreV1().PersistentVolumeClaims(namespace).List(b.t.Context(), metav1.ListOptions{})
	b.must(err)
	return list.Items
}

func (b *topolvmBench) persistentVolumes() []corev1.PersistentVolume {
	list, err := b.client.CoreV1().PersistentVolumes().List(b.t.Context(), metav1.ListOptions{})
	b.must(err)
	return list.Items
}

// topolvmTable renders the load of the separate processes and of the command topolvm.
func topolvmTable(loads [2][2]load) string {
	separate, standIn, one := loads[0][ofSidecars], loads[0][ofProgram], loads[1][ofProgram]
	var b strings.Builder
	b.WriteString("50 volumes of a StatefulSet, five nodes. Requests are per volume and without Leases and watches; in parentheses, " +
		"the writes. No Go module of topolvm-controller and livenessprobe can be built: `topolvm` under the name topolvm-controller " +
		"serves the driver instead of the first, and the second is missing. The sidecars have no limit of requests. " +
		"`topolvm` protects each creation with two patches of the PVC, and publishes a capacity when it changes.\n\n" +
		"| | csi-provisioner, csi-resizer, csi-snapshotter and this topolvm-controller | of these, topolvm-controller | `topolvm` |\n" +
		"|---|---|---|---|\n")
	row := func(title string, of func(loads ...load) string) {
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", title, of(separate, standIn), of(standIn), of(one))
	}
	total := func(title string, of func(l load) int) {
		row(title, func(loads ...load) string {
			n := 0
			for _, l := range loads {
				n += of(l)
			}
			return strconv.Itoa(n)
		})
	}
	total("processes", func(l load) int { return l.processes })
	total("watches", func(l load) int { return sum(l.watches) })
	total("connections to the API server", func(l load) int { return l.connections })
	total("memory MiB, idle", func(l load) int { return int(l.resident[0] >> 20) })
	total("memory MiB, at the end", func(l load) int { return int(l.resident[1] >> 20) })
	total("requests per minute, idle, with Leases", func(l load) int { return l.idle * int(time.Minute/topolvmIdle) })
	for i, p := range one.phases {
		row(p.name, func(loads ...load) string {
			var requests, writes float64
			for _, l := range loads {
				requests += float64(sum(l.phases[i].requests)) / float64(l.phases[i].n)
				writes += float64(l.phases[i].writes) / float64(l.phases[i].n)
			}
			return fmt.Sprintf("%.1f (%.1f)", requests, writes)
		})
	}
	return b.String()
}

// TestTopolvm runs the story with a few volumes on the command topolvm: it has one watch per kind, and writes nothing twice.
func TestTopolvm(t *testing.T) {
	kubetest.NeedReal(t)
	program, err := build(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	const n = 5
	l := newTopolvmBench(t, n).run(sidecars{topolvmCommand(program)})[ofProgram]
	if l.processes != 1 || l.connections != 1 || l.resident[1] == 0 {
		t.Errorf("%d processes with %d connections and %v bytes", l.processes, l.connections, l.resident)
	}
	for kind, watches := range l.watches {
		if watches != 1 {
			t.Errorf("%d watches of %s", watches, kind)
		}
	}
	want := map[string]map[string]int{
		"provision": {"create logicalvolumes": n, "create persistentvolumes": n, "patch persistentvolumeclaims": 2 * n,
			"get logicalvolumes": 0, "list logicalvolumes": 0, "get nodes": 0, "list nodes": 0},
		"expand":              {"patch logicalvolumes": n, "patch persistentvolumes": n, "patch pods": n},
		"snapshot":            {"create logicalvolumes": n, "patch volumesnapshotcontents/status": n},
		"clone":               {"create logicalvolumes": n, "create persistentvolumes": n},
		"delete the snapshot": {"delete logicalvolumes": n},
	}
	for _, p := range l.phases {
		for request, count := range want[p.name] {
			if p.requests[request] != count {
				t.Errorf("%s: %d requests %s, want %d", p.name, p.requests[request], request, count)
			}
		}
		delete(want, p.name)
	}
	if len(want) > 0 {
		t.Errorf("no phases %v", want)
	}
}
