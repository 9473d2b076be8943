// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kuberuntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/kubetest"
	"github.com/storage-controller/storage-controller/internal/looptest"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// TestHundredNodes has the instances of competitors nodes compete for three times as many
// claims that are made at once. It checks what holds at any speed; the log has the conflicts and the spread of the volumes, which
// depend on the load of the machine. Published for 100 instances of csi-provisioner: 3000
// claims, about 500 conflicts, about 40 volumes a second.
func TestHundredNodes(t *testing.T) {
	const nodes, claims = competitors, 3 * competitors
	f := &fixture{Fixture: &looptest.Fixture{T: t, ControlPlane: kubetest.Get(t)}} // not parallel
	f.Client, f.Namespace = f.ControlPlane.Client(), kubetest.Namespace(t, f.ControlPlane)
	f.Driver, f.class = f.Namespace+".example.com", f.Unique("fast")
	f.makeClass(nil)
	var wg sync.WaitGroup
	for part := range 10 {
		wg.Go(func() {
			for n := part; n < claims; n += 10 {
				f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name = fmt.Sprintf("claim-%03d", n) })
			}
		})
	}
	wg.Wait()
	// It is simulated that all claims appear at once to all instances. If they were
	// made one after the other now, the watches would be the most of the work.
	instances, appear := make([]*lightInstance, nodes), make(chan struct{})
	for i := range instances {
		wg.Go(func() { instances[i] = startLight(f, fmt.Sprintf("node-%02d", i), appear) })
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	kubetest.Eventually(t, "all instances have listed the claims", func(context.Context) error {
		for _, i := range instances {
			if err := i.informers.Synced(); err != nil {
				return err
			}
		}
		return nil
	})
	begin := time.Now()
	close(appear)
	provisioned := func() (sum int) {
		for _, i := range instances {
			sum += int(testutil.ToFloat64(i.c.metrics.provisioned.WithLabelValues(f.class, "")))
		}
		return sum
	}
	kubetest.Eventually(t, "all claims have their volume", func(context.Context) error {
		if n := provisioned(); n < claims {
			return fmt.Errorf("%d have", n)
		}
		return nil
	})
	took := time.Since(begin)

	var spread []int
	owner := map[string]string{} // of a volume, by its name
	created, conflicts := 0, 0
	for _, i := range instances {
		volumes := i.plugin.Volumes()
		for _, v := range volumes {
			if other := owner[v.Name]; other != "" {
				t.Errorf("volume %s was made on %s and %s", v.Name, other, i.node)
			}
			owner[v.Name] = i.node
		}
		spread = append(spread, len(volumes))
		created += i.plugin.Count(create)
		conflicts += int(testutil.ToFloat64(i.c.metrics.conflicts))
	}
	slices.Sort(spread)
	var histogram strings.Builder
	for n := spread[0]; n <= spread[nodes-1]; n++ {
		first, _ := slices.BinarySearch(spread, n)
		end, _ := slices.BinarySearch(spread, n+1)
		fmt.Fprintf(&histogram, " %d×%d", end-first, n)
	}
	t.Logf("%d conflicts; %d to %d volumes per node:%s; %v for all volumes (%.0f a second); %d goroutines", conflicts,
		spread[0], spread[nodes-1], histogram.String(), took.Round(time.Millisecond), claims/took.Seconds(), runtime.NumGoroutine())
	if created != claims || len(owner) != claims {
		t.Errorf("%d calls of CreateVolume for %d volumes, want %d", created, len(owner), claims)
	}
	// A claim changes once before it has an owner: each of the other instances may conflict with that change once.
	if most := claims * (nodes - 1); conflicts > most {
		t.Errorf("%d conflicts, want %d at most", conflicts, most)
	}
	list, err := f.Client.CoreV1().PersistentVolumeClaims(f.Namespace).List(t.Context(), metav1.ListOptions{})
	f.Must(err)
	for _, c := range list.Items {
		if node := owner["pvc-"+string(c.UID)]; node == "" || node != selectedNode(&c) {
			t.Errorf("claim %s: the volume is on %q, and the selected node is %q", c.Name, node, selectedNode(&c))
		}
	}
}

// lightInstance is the provisioner of one node, with all that a process has of its
// own, its connection to the API server among that, and few workers: the race detector
// does not bear the goroutines of a hundred processes.
type lightInstance struct {
	node      string
	plugin    *csitest.Plugin
	informers *kube.Informers
	c         *Controller
}

// startLight starts the instance of a node, which does nothing until begin is closed.
func startLight(f *fixture, node string, begin <-chan struct{}) *lightInstance {
	segments := map[string]string{"node": node}
	i := &lightInstance{node: node, plugin: csitest.Run(f.T, csitest.Config{
		Name: f.Driver, NodeID: node, Segments: []map[string]string{segments}, Capacity: 1 << 40, Latency: 5 * time.Millisecond,
		Controller: nodeCapabilities,
	})}
	try := func(err error) {
		if err != nil {
			f.Errorf("node %s: %v", node, err)
		}
	}
	own := f.ControlPlane.Config()
	own.Dial = (&net.Dialer{}).DialContext // a dialer of its own keeps the connection from being shared
	own.ContentType, own.AcceptContentTypes = kuberuntime.ContentTypeProtobuf, kuberuntime.ContentTypeProtobuf+","+
		kuberuntime.ContentTypeJSON
	transport, err := rest.HTTPClientFor(own)
	try(err)
	watch := kube.ForWatches(own, "test")
	watchClient, err := kubernetes.NewForConfigAndClient(watch, transport)
	try(err)
	meta, err := metadata.NewForConfigAndClient(metadata.ConfigFor(watch), transport)
	try(err)
	// as the flags are by default
	workClient, err := kubernetes.NewForConfigAndClient(kube.ForRole(own, "test", "provisioner", 5, 10), transport)
	try(err)
	reg := prometheus.NewRegistry()
	csiConfig := csiclient.DefaultConfig()
	csiConfig.Address = i.plugin.Address()
	client, err := csiclient.New(csiConfig, reg)
	try(err)
	driver, err := client.Connect(f.Context())
	try(err)
	cfg := DefaultConfig()
	cfg.NodeDeployment, cfg.NodeName, cfg.WorkerThreads = true, node, 4
	i.informers = kube.NewInformers(watchClient, meta, driver.Name)
	i.c, err = New(cfg, Deps{
		Driver: driver, Client: workClient, UnthrottledClient: workClient, Metadata: meta, Informers: i.informers, CSI: client.Controller(),
		Ready: func(ctx context.Context) error {
			select {
			case <-begin:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		},
		Events: &record.FakeRecorder{}, Registry: reg, Queues: workloop.NewMetrics(reg), Segments: segments,
	})
	try(err)
	if f.Failed() {
		return i
	}
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(f.Context()))
	i.informers.Start(ctx)
	done := make(chan error, 1)
	go func() { done <- i.c.Run(ctx) }()
	f.Cleanup(func() {
		cancel(errors.New("the test is over"))
		<-done
		i.informers.Shutdown()
		_ = client.Close()
		transport.CloseIdleConnections()
	})
	return i
}
