// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const (
	namespace = "default"
	zoneKey   = "topology.example.com/zone"
	immediate = "host-immediate"
	late      = "host-wait-for-pod"
)

// nodes is the zone of each node.
var nodes = map[string]string{"node-1": "east", "node-2": "east", "node-3": "west"}

// ready asks storage-controller whether it is.
func (d *demo) ready(ctx context.Context) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+d.endpoint+"/readyz?verbose", nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK || !strings.Contains(string(body), "informers ok") {
		return errors.New(strings.TrimSpace(string(body)))
	}
	return nil
}

func (d *demo) makeCluster(ctx context.Context) error {
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		spec := kubetest.NodeSpec{Name: name, Labels: map[string]string{zoneKey: nodes[name]}, Driver: driverName,
			TopologyKeys: []string{zoneKey}}
		if err := kubetest.CreateNode(ctx, d.client, spec); err != nil {
			return err
		}
		fmt.Printf("  node %s in zone %s\n", name, nodes[name])
	}
	for name, mode := range map[string]storagev1.VolumeBindingMode{immediate: storagev1.VolumeBindingImmediate,
		late: storagev1.VolumeBindingWaitForFirstConsumer} {
		class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: driverName, VolumeBindingMode: &mode,
			AllowVolumeExpansion: ptr.To(true)}
		if _, err := d.client.StorageV1().StorageClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
			return err
		}
		fmt.Printf("  StorageClass %s\n", name)
	}
	driver := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: driverName}}
	if _, err := d.client.StorageV1().CSIDrivers().Create(ctx, driver, metav1.CreateOptions{}); err != nil {
		return err
	}
	playing, stop := context.WithCancel(ctx)
	var ended sync.WaitGroup
	ended.Go(func() { kubetest.Kubelets{Client: d.client}.Run(playing) }) // there are no machines behind the nodes
	d.kubelets = func() { stop(); ended.Wait() }
	return nil
}

func claim(name, class string) corev1.PersistentVolumeClaim {
	return corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeClaimSpec{
		StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
	}}
}

func (d *demo) immediate(ctx context.Context) error {
	begin := time.Now()
	if _, err := d.client.CoreV1().PersistentVolumeClaims(namespace).Create(ctx, ptr.To(claim("alone", immediate)),
		metav1.CreateOptions{}); err != nil {
		return err
	}
	err := d.watch(ctx, begin, func(s state) error { return s.want(1, 0, 0) })
	if err == nil {
		d.numbers = append(d.numbers, fmt.Sprintf("%4.0f ms from a claim to a bound volume, 50 ms of them the driver's",
			time.Since(begin).Seconds()*1000))
	}
	return err
}

// createPods creates pods that spread over the zones, each with a claim.
func (d *demo) createPods(ctx context.Context) error {
	labels := map[string]string{"app": "web"}
	begin := time.Now()
	for i := range d.pods {
		c := claim(fmt.Sprintf("data-web-%d", i), late)
		if _, err := d.client.CoreV1().PersistentVolumeClaims(namespace).Create(ctx, &c, metav1.CreateOptions{}); err != nil {
			return err
		}
		source := corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: c.Name}}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: podName(i), Labels: labels}, Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](0),
			Volumes:                       []corev1.Volume{{Name: "data", VolumeSource: source}},
			Containers: []corev1.Container{{Name: "web", Image: "none",
				VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}}},
			TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{MaxSkew: 1, TopologyKey: zoneKey,
				WhenUnsatisfiable: corev1.DoNotSchedule, LabelSelector: &metav1.LabelSelector{MatchLabels: labels}}},
		}}
		if _, err := d.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	err := d.watch(ctx, begin, func(s state) error { return s.want(alone+d.pods, d.pods, d.pods) })
	if err == nil {
		d.numbers = append(d.numbers, fmt.Sprintf("%4.0f ms from %d pods with claims to the last running pod",
			time.Since(begin).Seconds()*1000, d.pods))
	}
	return err
}

func podName(i int) string { return fmt.Sprintf("web-%d", i) }

func (d *demo) deletePods(ctx context.Context) error {
	begin := time.Now()
	for i := 1; i < d.pods; i++ {
		if err := d.client.CoreV1().Pods(namespace).Delete(ctx, podName(i), metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	return d.watch(ctx, begin, func(s state) error { return s.want(alone+d.pods, 1, 1) })
}

// stuck creates a claim whose class names a Secret that does not exist, and waits until storage-controller reports that.
func (d *demo) stuck(ctx context.Context) error {
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "host-broken"}, Provisioner: driverName,
		Parameters: map[string]string{
			"csi.storage.k8s.io/provisioner-secret-name": "missing", "csi.storage.k8s.io/provisioner-secret-namespace": namespace}}
	if _, err := d.client.StorageV1().StorageClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
		return err
	}
	c := claim("stuck", class.Name)
	if _, err := d.client.CoreV1().PersistentVolumeClaims(namespace).Create(ctx, &c, metav1.CreateOptions{}); err != nil {
		return err
	}
	return kubetest.Await(ctx, func(ctx context.Context) error {
		events, err := d.client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=stuck"})
		if err == nil && !slices.ContainsFunc(events.Items, func(e corev1.Event) bool { return e.Reason == "ProvisioningFailed" }) {
			err = errors.New("claim stuck has no event ProvisioningFailed")
		}
		return err
	})
}

// look shows what storage-controller says about itself, and stays where that was asked for.
func (d *demo) look(ctx context.Context, stay bool) error {
	if err := d.stuck(ctx); err != nil {
		return err
	}
	if err := d.show(ctx, "explain", "pvc", "stuck", "-n", namespace, "--kubeconfig", d.cp.Kubeconfig()); err != nil {
		return err
	}
	if err := d.show(ctx, "doctor", "--leader-election", "--leader-election-namespace", namespace, "--csi-address", d.socket(),
		"--kubeconfig", d.cp.Kubeconfig()); err != nil {
		return err
	}
	fmt.Printf(`
  To look around while it is up (make demo STAY=1 keeps it so):
    export KUBECONFIG=%s
    kubectl get pvc,pv,volumeattachments,pods -o wide
    kubectl describe pvc alone
    %s explain pod web-0
    ls %s %s/*.log
  In a browser, http://%s/statusz shows current work and failures.
`, d.cp.Kubeconfig(), d.program("storage-controller"), d.root(), d.dir, d.endpoint)
	if !d.real {
		fmt.Println("  kubectl apply needs --validate=false: the simulated API server has no schemas.")
	}
	if !stay {
		return nil
	}
	fmt.Println("\n  Staying up. Ctrl-C deletes everything.")
	d.stays.Store(true)
	select {
	case <-d.leave:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// show runs a command of storage-controller and prints its report, that of doctor without the findings that are ok. Findings are no error.
func (d *demo) show(ctx context.Context, args ...string) error {
	program := d.program("storage-controller")
	fmt.Printf("  $ %s %s\n", program, strings.Join(args, " "))
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = environ()
	out, err := cmd.CombinedOutput()
	if finding := (&exec.ExitError{}); err != nil && !errors.As(err, &finding) {
		return err
	}
	for line := range strings.Lines(string(out)) {
		if args[0] != "doctor" || !strings.HasPrefix(line, "ok ") {
			fmt.Print("  " + line)
		}
	}
	fmt.Println()
	return nil
}

func (d *demo) deleteAll(ctx context.Context) error {
	begin := time.Now()
	if err := d.client.CoreV1().Pods(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		return err
	}
	if err := d.snapshotsOf(volumeSnapshots).Delete(ctx, snapshotName, metav1.DeleteOptions{}); err != nil {
		return err
	}
	if err := d.client.CoreV1().PersistentVolumeClaims(namespace).DeleteCollection(ctx, metav1.DeleteOptions{},
		metav1.ListOptions{}); err != nil {
		return err
	}
	return d.watch(ctx, begin, func(s state) error { return s.want(0, 0, 0) })
}

func (d *demo) nothingLeft(ctx context.Context) error {
	s, err := d.state(ctx)
	if err != nil {
		return err
	}
	if err := s.want(0, 0, 0); err != nil {
		return err
	}
	fmt.Println("  no claim, no PersistentVolume, no VolumeAttachment, no snapshot, no directory")
	return d.count()
}

// requests returns the watches and writes of storage-controller.
func (d *demo) requests() (watches, writes int, err error) {
	if s, ok := d.cp.(*simulated); ok {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.watches, s.writes, nil
	}
	records, err := d.cp.(*kubetest.ControlPlane).AuditSince(0, program)
	for _, r := range records {
		switch {
		case r.Verb == "watch" && r.Stage == "ResponseStarted":
			watches++
		case r.IsWrite() && counts(r.Object.Resource):
			writes++
		}
	}
	return watches, writes, err
}

// count adds the requests and the memory of the program to the summary.
func (d *demo) count() error {
	watches, writes, err := d.requests()
	if err != nil {
		return err
	}
	d.numbers = append(d.numbers, fmt.Sprintf("%4d watches, and %d writes for the whole life of %d volumes", watches, writes, alone+
		d.pods))
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.processes[1].Process.Pid))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(status)) {
		if kb, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			var n float64
			if _, err := fmt.Sscan(kb, &n); err == nil {
				d.numbers = append(d.numbers, fmt.Sprintf("%4.0f MiB of memory for provisioning and attaching", n/1024))
			}
		}
	}
	return nil
}
