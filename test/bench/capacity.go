// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	storagev1listers "k8s.io/client-go/listers/storage/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// capacityOptions are the settings of the command line with --capacity.
type capacityOptions struct {
	classes, threads int
	poll, grace      time.Duration
	churn            int // nodes that join, and nodes that leave, per minute
	churnTime        time.Duration
}

// topologyKey is the only one of the driver: each node is a segment.
const topologyKey = "bench.example.com/node"

// The scrapes of the metrics cost the process something; where nothing happens they are rare.
const (
	scrapeOften  = 100 * time.Millisecond
	scrapeSeldom = 5 * time.Second
)

// capacityResults is what a run of --capacity has measured.
type capacityResults struct {
	Commands []string        `json:"commands"`
	Nodes    int             `json:"nodes"`
	Classes  int             `json:"classes"`
	Latency  string          `json:"latency"`
	Poll     string          `json:"pollInterval"`
	Phases   []capacityPhase `json:"phases"`
	// Joined and Left are of one node each, in all classes.
	Joined lag `json:"joined"`
	Left   lag `json:"left"`
	// Leftovers are the objects for nodes that are gone, and Missing the pairs without
	// one, at the end.
	Leftovers int `json:"leftovers"`
	Missing   int `json:"missing"`
}

type capacityPhase struct {
	phase
	QueueDepth int64 `json:"highestQueueDepth"`
	PeakBytes  int64 `json:"highestResidentBytes"` // of all phases so far
	Writes     int   `json:"writes"`
}

// lag is how long something took, n times.
type lag struct {
	N      int     `json:"n"`
	Median float64 `json:"medianSeconds"`
	Max    float64 `json:"maxSeconds"`
}

func lagOf(times []time.Duration) lag {
	if len(times) == 0 {
		return lag{}
	}
	slices.Sort(times)
	return lag{N: len(times), Median: times[len(times)/2].Seconds(), Max: times[len(times)-1].Seconds()}
}

// capacityBench measures the publishing of capacity.
type capacityBench struct {
	*bench
	http     string // of the diagnostics server of the process
	interval atomic.Int64
	depth    atomic.Int64 // the highest since it was last taken
	done     *times
}

// measureCapacity sets everything up and runs the phases.
func measureCapacity(ctx context.Context, o options) (*capacityResults, error) {
	ctx, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	set, err := setUp(ctx, o, kubetest.Config{Audit: true}, csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY)
	if err != nil {
		return nil, err
	}
	defer set.tearDown()
	b := &capacityBench{bench: set, done: newTimes()}
	say("making %d nodes", o.nodes)
	if err := b.prepare(ctx); err != nil {
		return nil, err
	}
	commands := o.sidecars
	if commands == nil {
		program, err := build(ctx, b.dir)
		if err != nil {
			return nil, err
		}
		commands = sidecars{fmt.Sprintf("%s capacity --kubeconfig {kubeconfig} --csi-address {socket} --http-endpoint={http} "+
			"--capacity-ownerref-level=-1 --kube-api-capacity-qps=0 --capacity-threads=%d --capacity-poll-interval=%v "+
			"--capacity-removal-grace=%v",
			program, o.capacity.threads, o.capacity.poll, o.capacity.grace)}
	}
	if b.http, err = freeAddress(); err != nil { // last: others may take it
		return nil, err
	}
	for i := range commands {
		commands[i] = strings.ReplaceAll(commands[i], "{http}", b.http)
	}
	return b.run(ctx, commands)
}

// prepare makes classes and nodes.
func (b *capacityBench) prepare(ctx context.Context) error {
	if _, err := b.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		metav1.CreateOptions{}); err != nil {
		return err
	}
	for i := range b.o.capacity.classes {
		class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: class(i)}, Provisioner: b.driver,
			VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)}
		if _, err := b.client.StorageV1().StorageClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return each(ctx, b.o.nodes, b.join)
}

func class(i int) string { return fmt.Sprintf("class-%d", i) }

// join makes a node with the driver on it.
func (b *capacityBench) join(ctx context.Context, i int) error {
	return kubetest.CreateNode(ctx, b.client, kubetest.NodeSpec{Name: node(i), Labels: map[string]string{topologyKey: node(i)},
		Driver: b.driver, TopologyKeys: []string{topologyKey}})
}

// leave removes a node.
func (b *capacityBench) leave(ctx context.Context, i int) error {
	if err := b.client.StorageV1().CSINodes().Delete(ctx, node(i), metav1.DeleteOptions{}); err != nil {
		return err
	}
	return b.client.CoreV1().Nodes().Delete(ctx, node(i), metav1.DeleteOptions{})
}

// run runs the phases, one after the other.
func (b *capacityBench) run(ctx context.Context, commands sidecars) (*capacityResults, error) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer func() { cancel(); wg.Wait() }()
	published, err := b.watch(ctx)
	if err != nil {
		return nil, err
	}
	b.interval.Store(int64(scrapeOften))
	wg.Go(func() { b.scrape(ctx) })
	r := &capacityResults{Nodes: b.o.nodes, Classes: b.o.capacity.classes, Latency: b.o.latency.String(), Poll: b.o.capacity.poll.String()}
	say("waiting for %d objects", b.o.nodes*b.o.capacity.classes)
	begin := b.begin()
	stop, err := b.start(ctx, commands, "NAMESPACE="+namespace)
	if err != nil {
		return nil, err
	}
	defer stop()
	r.Commands = b.commands
	if err := b.firstPublication(ctx, r, begin); err != nil {
		return nil, err
	}

	say("nothing happens for %v", b.o.capacity.poll)
	b.interval.Store(int64(scrapeSeldom))
	begin = b.begin()
	if err := pause(ctx, b.o.capacity.poll); err != nil {
		return nil, err
	}
	r.Phases = append(r.Phases, b.phase(begin, "nothing happens", time.Since(begin.at)))

	say("%d nodes join and %d leave per minute, for %v", b.o.capacity.churn, b.o.capacity.churn, b.o.capacity.churnTime)
	left, err := b.comeAndGo(ctx, r)
	if err != nil {
		return nil, err
	}
	return r, b.countObjects(r, published, len(left))
}

// watch has b note when objects come and go.
func (b *capacityBench) watch(ctx context.Context) (storagev1listers.CSIStorageCapacityLister, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(b.client, 0, informers.WithNamespace(namespace))
	published := factory.Storage().V1().CSIStorageCapacities()
	note := func(what string) func(any) {
		return func(obj any) {
			if missed, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = missed.Obj
			}
			o := obj.(*storagev1.CSIStorageCapacity)
			b.done.note(what + " " + pair(o.StorageClassName, o.NodeTopology.MatchLabels[topologyKey]))
		}
	}
	if _, err := published.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: note("published"),
		DeleteFunc: note("withdrawn")}); err != nil {
		return nil, err
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	return published.Lister(), nil
}

// firstPublication waits until there is an object for each node and class.
func (b *capacityBench) firstPublication(ctx context.Context, r *capacityResults, begin sample) error {
	var last time.Time
	for i := range b.o.nodes {
		at, err := b.await(ctx, "published", i)
		if err != nil {
			return err
		}
		if at.After(last) {
			last = at
		}
	}
	// A watch delivers a write before it is in the audit log.
	if err := pause(ctx, time.Second); err != nil {
		return err
	}
	r.Phases = append(r.Phases, b.phase(begin, "first publication", last.Sub(begin.at)))
	return nil
}

// comeAndGo has nodes join and leave, and waits until their objects have. It returns those
// that have left.
func (b *capacityBench) comeAndGo(ctx context.Context, r *capacityResults) (left []time.Time, err error) {
	b.interval.Store(int64(scrapeOften))
	begin := b.begin()
	joined, left, err := b.churn(ctx)
	if err != nil {
		return nil, err
	}
	r.Joined, err = b.lags(ctx, "published", b.o.nodes, joined)
	if err == nil {
		r.Left, err = b.lags(ctx, "withdrawn", 0, left)
	}
	if err != nil {
		return nil, err
	}
	if err := pause(ctx, time.Second); err != nil {
		return nil, err
	}
	r.Phases = append(r.Phases, b.phase(begin, "nodes come and go", time.Since(begin.at)))
	return left, nil
}

// countObjects counts the objects of the nodes that have left, and those that are missing.
func (b *capacityBench) countObjects(r *capacityResults, published storagev1listers.CSIStorageCapacityLister, left int) error {
	objects, err := published.List(labels.Everything())
	if err != nil {
		return err
	}
	for _, o := range objects {
		n, _ := strconv.Atoi(strings.TrimPrefix(o.NodeTopology.MatchLabels[topologyKey], "node-"))
		if n < left {
			r.Leftovers++
		}
	}
	r.Missing = b.o.nodes*b.o.capacity.classes - (len(objects) - r.Leftovers)
	return nil
}

func pair(class, node string) string { return class + " " + node }

// await waits until what was said of the objects of a node, in all classes; it is when
// the last was.
func (b *capacityBench) await(ctx context.Context, what string, i int) (last time.Time, err error) {
	for c := range b.o.capacity.classes {
		at, err := b.done.wait(ctx, what+" "+pair(class(c), node(i)))
		if err != nil {
			return last, fmt.Errorf("waiting for objects of %s to be %s: %w%s", node(i), what, err, b.tails())
		}
		if at.After(last) {
			last = at
		}
	}
	return last, nil
}

// churn has nodes join, and the oldest leave, at equal distances. It returns when each had
// joined and when each began to leave.
func (b *capacityBench) churn(ctx context.Context) (joined, left []time.Time, err error) {
	tick := time.NewTicker(time.Minute / time.Duration(b.o.capacity.churn))
	defer tick.Stop()
	for i := range int(b.o.capacity.churnTime * time.Duration(b.o.capacity.churn) / time.Minute) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		}
		if err := b.join(ctx, b.o.nodes+i); err != nil {
			return nil, nil, err
		}
		joined = append(joined, time.Now())
		left = append(left, time.Now())
		if err := b.leave(ctx, i); err != nil {
			return nil, nil, err
		}
	}
	return joined, left, nil
}

// lags is how long after each of began the objects of a node, of which the first is
// first, were as they should be.
func (b *capacityBench) lags(ctx context.Context, what string, first int, began []time.Time) (lag, error) {
	var took []time.Duration
	for i, began := range began {
		at, err := b.await(ctx, what, first+i)
		if err != nil {
			return lag{}, err
		}
		took = append(took, max(at.Sub(began), 0))
	}
	return lagOf(took), nil
}

func (b *capacityBench) phase(begin sample, name string, took time.Duration) capacityPhase {
	p := capacityPhase{phase: b.end(begin, name, 0, took, nil), QueueDepth: b.depth.Swap(0),
		PeakBytes: b.memory("VmHWM:")}
	for request, n := range p.Requests {
		verb, _, _ := strings.Cut(request, " ")
		if (kubetest.AuditEvent{Verb: verb}).IsWrite() {
			p.Writes += n
		}
	}
	return p
}

// scrape notes the depth of the queue, until ctx ends.
func (b *capacityBench) scrape(ctx context.Context) {
	for pause(ctx, time.Duration(b.interval.Load())) == nil {
		depth, err := b.scrapeOnce(ctx)
		if err == nil {
			b.depth.Store(max(b.depth.Load(), depth))
		}
	}
}

func (b *capacityBench) scrapeOnce(ctx context.Context) (int64, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+b.http+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	return queueDepth(response.Body)
}

// queueDepth reads the depth of the queue from the text of metrics.
func queueDepth(text io.Reader) (int64, error) {
	lines := bufio.NewScanner(text)
	for lines.Scan() {
		if value, found := strings.CutPrefix(lines.Text(), `workqueue_depth{name="csistoragecapacity"} `); found {
			depth, err := strconv.ParseFloat(value, 64)
			return int64(depth), err
		}
	}
	return 0, cmp.Or(lines.Err(), fmt.Errorf("no depth of the queue among the metrics"))
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// freeAddress returns an unused address.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// table prints r for people.
func (r *capacityResults) table(out io.Writer) {
	fmt.Fprintf(out, "\n%d nodes, each a segment, %d classes, driver latency %s, polled every %s\n", r.Nodes, r.Classes, r.Latency, r.Poll)
	for _, c := range r.Commands {
		fmt.Fprintf(out, "measured: %s\n", c)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\nphase\tseconds\tGetCapacity\twrites\tqueue\tCPU s\tRSS MiB\tpeak MiB\tread MiB\t")
	for _, p := range r.Phases {
		fmt.Fprintf(w, "%s\t%.1f\t%d\t%d\t%d\t%.2f\t%.1f\t%.1f\t%.1f\t\n", p.Name, p.Seconds, p.Calls["GetCapacity"], p.Writes,
			p.QueueDepth, p.CPUSeconds,
			float64(p.ResidentBytes)/(1<<20), float64(p.PeakBytes)/(1<<20), float64(p.BytesRead)/(1<<20))
	}
	w.Flush()
	fmt.Fprintf(out, "\n%d nodes joined: objects after %.3f s (median), %.3f s at most\n", r.Joined.N, r.Joined.Median, r.Joined.Max)
	fmt.Fprintf(out, "%d nodes left: objects gone after %.3f s (median), %.3f s at most\n", r.Left.N, r.Left.Median, r.Left.Max)
	fmt.Fprintf(out, "at the end: %d objects too many, %d too few\n", r.Leftovers, r.Missing)
	for _, p := range r.Phases {
		fmt.Fprintf(out, "%s: requests %s\n", p.Name, per(p.Requests, 1))
	}
}
