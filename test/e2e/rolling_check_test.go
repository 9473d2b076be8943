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
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
)

// leaseHistory is who held the Leases of a namespace when.
type leaseHistory struct {
	*env
	watch watch.Interface

	mu    sync.Mutex
	terms map[string][]*leaseTerm // by the name of the Lease, in order
}

// leaseTerm is the time between two changes of the holder, as the holder says it.
type leaseTerm struct {
	holder   string
	acquired time.Time
	released time.Time // zero while it is not released, and also when another replica acquired it
}

func newLeaseHistory(e *env) *leaseHistory {
	e.t.Helper()
	w, err := e.client.CoordinationV1().Leases(e.ns).Watch(e.t.Context(), metav1.ListOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	return &leaseHistory{env: e, watch: w, terms: map[string][]*leaseTerm{}}
}

// run notes what happens until ctx ends.
func (h *leaseHistory) run(ctx context.Context) {
	defer h.watch.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case event, ok := <-h.watch.ResultChan():
			lease, is := event.Object.(*coordinationv1.Lease)
			if !ok || !is {
				if ctx.Err() == nil {
					h.t.Errorf("the watch of the Leases ended: %v", event)
				}
				return
			}
			h.note(lease)
		}
	}
}

func (h *leaseHistory) note(lease *coordinationv1.Lease) {
	h.mu.Lock()
	defer h.mu.Unlock()
	terms := h.terms[lease.Name]
	holder := ptr.Deref(lease.Spec.HolderIdentity, "")
	last := &leaseTerm{}
	if len(terms) > 0 {
		last = terms[len(terms)-1]
	}
	switch {
	case holder == "":
		last.released = lease.Spec.RenewTime.Time
	case holder != last.holder || !lease.Spec.AcquireTime.Time.Equal(last.acquired):
		h.terms[lease.Name] = append(terms, &leaseTerm{holder: holder, acquired: lease.Spec.AcquireTime.Time})
	}
}

// during is the term of a holder in which something began; nil: it did not lead.
func (h *leaseHistory) during(lease, holder string, began time.Time) *leaseTerm {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, term := range slices.Backward(h.terms[lease]) {
		if term.holder == holder && !began.Before(term.acquired) {
			return term
		}
	}
	return nil
}

// check looks at what happened.
func (c *change) check() {
	c.t.Helper()
	claims, attachments := c.load.left()
	doubts := 0
	for _, name := range []string{"there", "back"} {
		for _, call := range c.plugin.Calls("CreateVolume") {
			if call.Request.(*csi.CreateVolumeRequest).Parameters[doubtful] == name {
				doubts++ // whose claim stays, and is bound
				break
			}
		}
	}
	c.agrees(len(claims) + doubts)
	c.attached(attachments)
	c.t.Logf("%d claims were made, %d of them are left, %d attached", len(c.load.claims), len(claims), attachments)
	c.oneVolumeEach()
	c.onePersistentVolumeEach()
	for lease, methods := range c.roles() {
		c.oneAtWork(methods)
		c.leadsWhoWorks(lease, methods)
	}
	c.noOtherLease()
}

// oneVolumeEach: in all calls for a claim the same was asked for, and there never was but
// one volume.
func (c *change) oneVolumeEach() {
	c.t.Helper()
	asked, made := map[string]*csi.CreateVolumeRequest{}, map[string]string{}
	for _, call := range c.plugin.Calls("CreateVolume") {
		request := call.Request.(*csi.CreateVolumeRequest)
		if before := asked[request.Name]; before != nil && !proto.Equal(before, request) {
			c.t.Errorf("asked for\n%v\nand then for\n%v", before, request)
		}
		asked[request.Name] = request
		if response, ok := call.Response.(*csi.CreateVolumeResponse); ok {
			id := response.GetVolume().GetVolumeId()
			if before := made[request.Name]; before != "" && before != id {
				c.t.Errorf("volumes %s and %s are those of the same claim", before, id)
			}
			made[request.Name] = id
		}
	}
	claims, _ := c.load.left()
	for _, claim := range claims {
		if want := "pvc-" + string(claim.uid); claim.claim.Spec.VolumeName != want || made[want] == "" {
			c.t.Errorf("claim %s has PersistentVolume %q and volume %q", claim.name, claim.claim.Spec.VolumeName, made[want])
		}
	}
}

// onePersistentVolumeEach: a PersistentVolume was never made twice, one after another.
func (c *change) onePersistentVolumeEach() {
	c.t.Helper()
	records, err := c.cp.AuditSince(c.mark, "")
	if err != nil {
		c.t.Fatal(err)
	}
	ours, made := map[string]bool{}, map[string]int{}
	for _, call := range c.plugin.Calls("CreateVolume") {
		ours[call.Request.(*csi.CreateVolumeRequest).Name] = true
	}
	for _, r := range records {
		if r.Verb == "create" && r.Resource() == "persistentvolumes" && r.Status.Code < 300 && ours[r.Object.Name] {
			made[r.Object.Name]++
		}
	}
	for name, n := range made {
		if n != 1 {
			c.t.Errorf("PersistentVolume %s was made %d times", name, n)
		}
	}
	if len(made) < len(ours)/2 {
		c.t.Errorf("the audit log knows of %d PersistentVolumes for %d volumes", len(made), len(ours))
	}
}

// span is a call, up to the exit of its client.
type span struct {
	csitest.Call
	by *worker
}

func (c *change) spans(methods []string) (spans []span) {
	c.t.Helper()
	for _, call := range c.plugin.Calls(methods...) {
		i := slices.IndexFunc(c.workers, func(w *worker) bool { return w.socket == call.Socket })
		if i < 0 {
			c.t.Fatalf("a call at %q, which belongs to no process", call.Socket)
		}
		by := c.workers[i]
		if call.Ended.IsZero() {
			c.t.Fatalf("%s by %s has not ended", call.Method, by.pod)
		}
		if by.killed && call.Ended.After(by.died) {
			call.Ended = by.died
		}
		spans = append(spans, span{call, by})
	}
	return spans
}

// oneAtWork: calls of two processes are never under way at the same time.
func (c *change) oneAtWork(methods []string) {
	c.t.Helper()
	var last span // to end
	changes := 0
	for _, s := range c.spans(methods) { // in the order of their beginning
		if last.by != nil && s.by != last.by {
			changes++
			if s.Began.Before(last.Ended) {
				c.t.Errorf("%s by %s began %v before the end of %s by %s", s.Method, s.by.pod, last.Ended.Sub(s.Began), last.Method,
					last.by.pod)
			}
		}
		if !s.Ended.Before(last.Ended) {
			last = s
		}
	}
	if changes < 2 {
		c.t.Errorf("%v: the work changed hands %d times, want at least there and back", methods, changes)
	}
}

// leadsWhoWorks: a call begins and ends while its caller holds the Lease of the role, unless
// the caller dies.
func (c *change) leadsWhoWorks(lease string, methods []string) {
	c.t.Helper()
	for _, s := range c.spans(methods) {
		term := c.leases.during(lease, s.by.pod, s.Began.Round(0)) // other processes have other monotonic clocks
		switch {
		case term == nil:
			c.t.Errorf("%s by %s, which did not hold Lease %s", s.Method, s.by.pod, lease)
		case !term.released.IsZero() && s.Ended.Round(0).Truncate(time.Microsecond).After(term.released):
			c.t.Errorf("%s by %s ended %v after Lease %s was released", s.Method, s.by.pod, s.Ended.Sub(term.released), lease)
		}
	}
}

// noOtherLease: there are the Leases of the sidecars, and no other.
func (c *change) noOtherLease() {
	c.t.Helper()
	c.leases.mu.Lock()
	defer c.leases.mu.Unlock()
	want := slices.Sorted(maps.Keys(c.roles()))
	if names := slices.Sorted(maps.Keys(c.leases.terms)); !slices.Equal(names, want) {
		c.t.Errorf("Leases %v, want %v", names, want)
	}
	for _, name := range want {
		var holders []string
		for _, term := range c.leases.terms[name] {
			holders = append(holders, term.holder)
		}
		c.t.Logf("Lease %s: %s", name, strings.Join(holders, ", "))
	}
}

// released waits until no process holds a Lease. The real sidecars do not release theirs.
func (c *change) released() {
	c.t.Helper()
	for lease := range c.roles() {
		if c.lastHolder(lease).real {
			continue
		}
		c.eventually("Lease "+lease+" is released", func(ctx context.Context) error {
			l, err := c.lease(ctx, lease)
			if err == nil && ptr.Deref(l.Spec.HolderIdentity, "") != "" {
				err = fmt.Errorf("%s holds it", *l.Spec.HolderIdentity)
			}
			return err
		})
	}
}

// lastHolder is the process that held a Lease last.
func (c *change) lastHolder(lease string) *worker {
	c.t.Helper()
	c.leases.mu.Lock()
	defer c.leases.mu.Unlock()
	terms := c.leases.terms[lease]
	holder := terms[len(terms)-1].holder
	i := slices.IndexFunc(c.workers, func(w *worker) bool { return w.pod == holder })
	if i < 0 {
		c.t.Fatalf("Lease %s is held by %q, which is the name of no process", lease, holder)
	}
	return c.workers[i]
}
