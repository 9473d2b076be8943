// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// TestOneCallAndFewWritesPerVolume lets volumes live their whole life and counts
// what that takes, at the driver and in the audit log.
func TestOneCallAndFewWritesPerVolume(t *testing.T) {
	const n = 200 // also more than the 25 events that client-go lets through at once
	e := newEnv(t, csitest.Config{Latency: 20 * time.Millisecond, Segments: []map[string]string{{}}}, 4)
	class := e.class(false, nil)
	start := e.mark()
	p := e.run("all", "--http-endpoint=127.0.0.1:0")
	e.eventually("the roles work", func(context.Context) error { // the provisioner reads claims that are older than its term
		lists := map[string]int{}
		for _, r := range e.audited(start, "storage-controller/") {
			if r.Verb == "list" {
				lists[r.Object.Resource]++
			}
		}
		if !maps.Equal(lists, listsAtStart) {
			return fmt.Errorf("lists %v, want %v", lists, listsAtStart)
		}
		return nil
	})
	mark := e.mark()

	e.parallel(n, func(i int) { e.claim(fmt.Sprintf("c%d", i), class) })
	volumes := make([]string, n)
	for i := range n {
		volumes[i] = e.bound(fmt.Sprintf("c%d", i))
	}
	e.calls("CreateVolume", n)
	e.eventually("there is an event for every volume", func(ctx context.Context) error {
		events, err := e.client.CoreV1().Events(e.ns).List(ctx, metav1.ListOptions{FieldSelector: "reason=ProvisioningSucceeded"})
		if err == nil && len(events.Items) != n {
			err = fmt.Errorf("there are %d", len(events.Items))
		}
		return err
	})
	mark = e.requests(mark, map[string]int{"create persistentvolumes": n, "create events": n + p.slowCreations(e)})

	e.parallel(n, func(i int) { e.attach(fmt.Sprintf("a%d", i), volumes[i], e.nodes[i%len(e.nodes)]) })
	e.attached(n)
	e.calls("ControllerPublishVolume", n)
	mark = e.requests(mark, map[string]int{"patch volumeattachments": n, "patch volumeattachments/status": n})

	e.parallel(n, func(i int) { e.detach(fmt.Sprintf("a%d", i)) })
	e.attached(0)
	e.calls("ControllerUnpublishVolume", n)
	mark = e.requests(mark, map[string]int{"patch volumeattachments": n})

	e.parallel(n, func(i int) { e.deleteClaim(fmt.Sprintf("c%d", i)) })
	e.agrees(0)
	e.calls("DeleteVolume", n)
	e.requests(mark, map[string]int{"get persistentvolumes": n, "patch persistentvolumes": n, "delete persistentvolumes": n})

	for method, want := range map[string]int{"CreateVolume": n, "ControllerPublishVolume": n, "ControllerUnpublishVolume": n,
		"DeleteVolume": n} {
		e.calls(method, want)
	}
}

// slowCreations returns the number of Provisioning events: the provisioner announces a call that takes longer than a
// second, as on a busy machine. It fails the test if the metrics have fewer calls that took half of that.
func (p *process) slowCreations(e *env) int {
	p.t.Helper()
	events, err := e.client.CoreV1().Events(e.ns).List(p.t.Context(), metav1.ListOptions{FieldSelector: "reason=Provisioning"})
	if err != nil {
		p.t.Fatal(err)
	}
	slow := 0
	for _, m := range p.metrics()["csi_sidecar_operations_seconds"].GetMetric() {
		if !strings.Contains(labelsOf(m), "method_name=/csi.v1.Controller/CreateVolume") {
			continue
		}
		slow += int(m.GetHistogram().GetSampleCount())
		for _, b := range m.GetHistogram().GetBucket() {
			if b.GetUpperBound() == 0.5 {
				slow -= int(b.GetCumulativeCount())
			}
		}
	}
	if len(events.Items) > slow {
		p.t.Errorf("%d events announce slow calls of CreateVolume, and %d calls took more than 0.5s", len(events.Items), slow)
	}
	return len(events.Items)
}

func (e *env) parallel(n int, do func(int)) {
	var wg sync.WaitGroup
	limit := make(chan struct{}, 20)
	for i := range n {
		limit <- struct{}{}
		wg.Go(func() { defer func() { <-limit }(); do(i) })
	}
	wg.Wait()
}

// listsAtStart is the list requests of "all". The provisioner lists one claim and one PersistentVolume, and the attacher
// lists one PersistentVolume, for the resourceVersion. A watch brings the objects.
var listsAtStart = map[string]int{"persistentvolumeclaims": 1, "persistentvolumes": 2}

func (e *env) mark() int64 {
	e.t.Helper()
	mark, err := e.cp.AuditOffset()
	if err != nil {
		e.t.Fatal(err)
	}
	return mark
}

// audited returns the requests since mark of the processes of this test whose user agent begins with agent. The process of
// a test that waits for its turn in parallel runs meanwhile.
func (e *env) audited(mark int64, agent string) []kubetest.AuditEvent {
	e.t.Helper()
	records, err := e.cp.AuditSince(mark, agent)
	if err != nil {
		e.t.Fatal(err)
	}
	return slices.DeleteFunc(records, func(r kubetest.AuditEvent) bool { return r.As.Username != accountOf(e.ns) })
}

// watches returns the number of watches among records by kind, without those that continue an earlier one: the API server
// ends the watch of a client that reads too slowly.
func watches(records []kubetest.AuditEvent) map[string]int {
	watches := map[string]int{}
	for _, r := range records {
		if r.Verb == "watch" && r.Stage == "ResponseStarted" {
			n := 0
			if strings.Contains(r.RequestURI, "sendInitialEvents=true") {
				n = 1
			}
			watches[r.Object.Resource] += n
		}
	}
	return watches
}

// requests fails the test unless the program has made exactly these requests for volumes since mark, reads and
// events included, and all of them well. It does not count those of the process, such as watches and Leases.
func (e *env) requests(mark int64, want map[string]int) (next int64) {
	e.t.Helper()
	return e.counted(mark, want, func(r kubetest.AuditEvent) bool {
		return r.Verb != "watch" && slices.Contains([]string{"persistentvolumeclaims", "persistentvolumes", "volumeattachments", "events"},
			r.Object.Resource)
	})
}

// writes fails the test unless the program has made exactly these requests since
// mark, events aside, and all of them well except those of refused, such as "patch pods 409".
func (e *env) writes(mark int64, want map[string]int, refused ...string) (next int64) {
	e.t.Helper()
	return e.counted(mark, want, func(r kubetest.AuditEvent) bool {
		return r.IsWrite() && r.Object.Resource != "events" && r.Object.Resource != "leases"
	}, refused...)
}

// counted fails the test unless the program has made exactly these of the requests that counts selects.
func (e *env) counted(mark int64, want map[string]int, counts func(kubetest.AuditEvent) bool, refused ...string) (next int64) {
	e.t.Helper()
	next = e.mark()
	records := e.audited(mark, "storage-controller/")
	got := map[string]int{}
	for _, r := range records {
		if !counts(r) {
			continue
		}
		key := r.Verb + " " + r.Resource()
		if r.Status.Code >= 300 {
			key += fmt.Sprint(" ", r.Status.Code)
		}
		got[key]++
	}
	for _, key := range refused {
		delete(got, key)
	}
	if !maps.Equal(got, want) {
		e.t.Errorf("requests: got %v, want %v", got, want)
	}
	return next
}

// TestOneWatchPerKindAndOneConnection counts what "all" opens.
func TestOneWatchPerKindAndOneConnection(t *testing.T) {
	e := newEnv(t, csitest.Config{Segments: []map[string]string{{}}}, 2)
	class := e.class(false, nil)
	mark := e.mark()
	e.run("all", "--leader-election")
	e.claim("c", class)
	e.attach("a", e.bound("c"), e.nodes[0])
	e.attached(1)

	records := e.audited(mark, "storage-controller/")
	watches, lists := watches(records), map[string]int{}
	for _, r := range records {
		if r.Verb == "list" {
			lists[r.Object.Resource]++
		}
	}
	// The ConfigMap has the records of lost nodes.
	want := []string{"configmaps", "csinodes", "nodes", "persistentvolumeclaims", "persistentvolumes", "storageclasses",
		"volumeattachments"}
	if got := slices.Sorted(maps.Keys(watches)); !slices.Equal(got, want) {
		t.Errorf("watches on %v, want %v", got, want)
	}
	for kind, n := range watches {
		if n != 1 {
			t.Errorf("%d watches on %s, want one", n, kind)
		}
	}
	if !maps.Equal(lists, listsAtStart) {
		t.Errorf("lists %v, want %v", lists, listsAtStart)
	}
	if accepted, open := e.plugin.Connections(); accepted != 1 || open != 1 {
		t.Errorf("%d connections to the driver, %d open; want one", accepted, open)
	}
	driver := strings.ReplaceAll(e.plugin.Name(), ".", "-")
	e.eventually("each role has its Lease", func(ctx context.Context) error {
		leases, err := e.client.CoordinationV1().Leases(e.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var names []string
		for _, l := range leases.Items {
			names = append(names, l.Name)
		}
		want := []string{driver, "external-attacher-leader-" + driver, "nodecontroller-leader-" + driver}
		if slices.Sort(names); !slices.Equal(names, slices.Sorted(slices.Values(want))) {
			return fmt.Errorf("Leases %v, want those of the separate sidecars and that of the nodecontroller, %v", names, want)
		}
		return nil
	})
}

// TestLifeOfAStatefulSet is the story of the demo: pods with claims of their own,
// placed by the scheduler, and everything gone in the end.
func TestLifeOfAStatefulSet(t *testing.T) {
	e := newEnv(t, csitest.Config{Segments: []map[string]string{{}}}, 4)
	class := e.class(true, nil)
	e.run("all")
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(kubetestRun(ctx, e))
	defer wg.Wait()
	defer stop()
	e.statefulSet("web", class, 3)
	e.running("web", 3)
	e.agrees(3)
	for _, v := range e.plugin.Volumes() {
		pods := len(v.Published)
		if pods != 1 {
			t.Errorf("volume %s is published %d times", v.Name, pods)
		}
	}
	e.scale("web", 1)
	e.attached(1)
	e.agrees(3)
	e.scale("web", 3)
	e.running("web", 3)
	e.attached(3)
	e.calls("CreateVolume", 3)
	e.deleteStatefulSet("web")
	e.attached(0)
	for i := range 3 {
		e.deleteClaim(fmt.Sprintf("data-web-%d", i))
	}
	e.agrees(0)
	e.calls("DeleteVolume", 3)
}

func kubetestRun(ctx context.Context, e *env) func() {
	return func() { kubetest.Kubelets{Client: e.client}.Run(ctx) }
}
