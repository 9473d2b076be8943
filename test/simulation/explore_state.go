// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// state identifies what the rest of a history depends on: the time, the objects of the API, the volumes of the driver, the
// operations that wait, and the processes.
//
// The memory of a process cannot be compared. Instead, a process is what it has observed since its start: the events of its watches
// and the responses to its requests and calls, with their times. It is deterministic, except for random delays and the order in which
// its goroutines run between two events, so that equal observations lead to equal memory. What it has observed between two of its
// requests counts as a set: if an event had led to a request, the set would have ended there. A process could remember the order of
// two events to which it did not react, and two histories that differ only in that count as equal.
type state [sha256.Size]byte

// observations holds what a window knows about the objects and processes.
type observations struct {
	begin   time.Time
	version uint64 // of the last change in objects
	// objects are the hashes of the writes of each object, which is named by resource and key, since the begin. They replace
	// resourceVersions, which depend on the writes of other objects.
	objects   map[string]string
	written   map[uint64]string // the same after each write, by resourceVersion
	processes map[*replica]*observer
	known     map[*operation]bool // requests and calls of processes
	contents  map[string]string   // what responses that are under way contain
}

// observer is what a process has observed.
type observer struct {
	before string   // until its last request or call
	since  []string // since then
}

// watchProcesses begins to record what processes observe.
func (w *window) watchProcesses() {
	w.seen = observations{
		begin: time.Now(), version: w.simulation.api.Version(), objects: map[string]string{}, written: map[uint64]string{},
		processes: map[*replica]*observer{}, known: map[*operation]bool{}, contents: map[string]string{},
	}
}

func hash(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return hex.EncodeToString(sum[:])
}

// noise matches what differs between equal objects: the resourceVersion, and the random part of the identity of a provisioner, which
// records it on claims after the time of its start.
var noise = regexp.MustCompile(`"resourceVersion":"\d+"|(946\d{9})-\d{1,4}-`)

// update records the writes since the last one.
func (o *observations) update(w *window) {
	for _, c := range w.simulation.api.Changes(o.version) {
		o.version = c.Version
		if c.Resource.Group == coordinationv1.GroupName {
			continue
		}
		content, err := json.Marshal(c.Object) // null after a deletion
		if err != nil {
			panic(err) // the API server has encoded it, too
		}
		name := c.Resource.Resource + " " + c.Key
		o.objects[name] = hash(o.objects[name], noise.ReplaceAllString(string(content), "$1"))
		o.written[c.Version] = o.objects[name]
	}
}

// of returns the observations of a process. Those of a new process begin with the objects.
func (o *observations) of(w *window, r *replica) *observer {
	if o.processes[r] == nil {
		o.update(w)
		o.processes[r] = &observer{before: hash(o.now(), o.resource(""))}
	}
	return o.processes[r]
}

func (o *observations) now() string { return time.Since(o.begin).String() }

// resource returns the objects of resources whose names have that prefix.
func (o *observations) resource(prefix string) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(o.objects)) {
		if strings.HasPrefix(name, prefix) {
			all = append(all, name, o.objects[name])
		}
	}
	return hash(all...)
}

// react records which requests and calls the processes have begun.
func (o *observations) react(w *window) {
	o.update(w)
	begun := map[*replica][]string{}
	for _, p := range w.simulation.gate.begin(w.simulation.step) {
		if p.lease || p.kind != request && p.kind != call || o.known[p] {
			continue
		}
		o.known[p] = true
		begun[p.replica] = append(begun[p.replica], p.name+" "+p.key)
	}
	for r, names := range begun {
		process := o.of(w, r)
		slices.Sort(names)
		slices.Sort(process.since)
		process.before = hash(append(append([]string{process.before, o.now()}, process.since...), names...)...)
		process.since = nil
	}
}

// continues records what a process observes when p continues. What a request or call returns depends on the objects, or the
// driver, at the time when it is executed.
func (o *observations) continues(w *window, p *operation, text string) {
	o.update(w)
	process, observed := o.of(w, p.replica), ""
	switch p.kind {
	case request:
		observed = o.resource(strings.Split(strings.Fields(p.name)[1], "/")[0] + " ")
	case call:
		observed = driverState(w.simulation)
	case event:
		observed = o.canonical(p)
	case response, callResponse:
		observed = o.contents[responseKey(p, p.name)]
		delete(o.contents, responseKey(p, p.name))
	}
	if (p.kind == request || p.kind == call) && text == "" {
		o.contents[responseKey(p, "response to "+p.name)] = observed
		return
	}
	process.since = append(process.since, strings.Join([]string{o.now(), o.canonical(p), p.key, text, observed}, " "))
}

// gaveUp records that the client of p has given up.
func (o *observations) gaveUp(w *window, p *operation) {
	process := o.of(w, p.replica)
	process.since = append(process.since, strings.Join([]string{o.now(), p.name, p.key, "gave up"}, " "))
}

func responseKey(p *operation, name string) string {
	return p.replica.client + " " + name + " " + p.key
}

// canonical returns the name of p, with the hash of an object instead of its resourceVersion.
func (o *observations) canonical(p *operation) string {
	name, text, _ := strings.Cut(p.name, " @")
	version, _ := strconv.ParseUint(text, 10, 64) // 0: none
	return name + " " + o.written[version]
}

// identity returns what distinguishes p from other operations.
func (o *observations) identity(p *operation) string {
	return strings.Join([]string{
		p.replica.client, fmt.Sprint(p.kind, p.canceled()), o.canonical(p), p.key, o.contents[responseKey(p, p.name)],
	}, " ")
}

// driverState returns the volumes and snapshots of the driver.
func driverState(s *simulation) string {
	var all []string
	for _, v := range s.volumes() {
		all = append(all, fmt.Sprint(v.ID, v.Name, v.Capacity, v.Parameters, v.Mutable, slices.Sorted(maps.Keys(v.Published))))
	}
	for _, v := range s.snapshots() {
		all = append(all, fmt.Sprint(v.ID, v.Name, v.VolumeID, v.Size))
	}
	return hash(all...)
}

// state returns the state.
func (w *window) state() state {
	w.seen.update(w)
	all := []string{w.seen.now(), fmt.Sprint(w.interfered), w.seen.resource(""), driverState(w.simulation)}
	for _, r := range w.simulation.replicas {
		if r == nil {
			all = append(all, "none")
			continue
		}
		process := w.seen.of(w, r)
		slices.Sort(process.since)
		all = append(all, fmt.Sprint(r.client, w.isLeader(r), len(process.since)), process.before)
		all = append(all, process.since...)
	}
	for _, l := range cluster.List[*coordinationv1.Lease](w.simulation.api, coordinationv1.SchemeGroupVersion.WithResource("leases")) {
		all = append(all, fmt.Sprint(l.Name, " ", ptr.Deref(l.Spec.HolderIdentity, "")))
	}
	var pending []string
	for _, p := range w.simulation.gate.begin(w.simulation.step) {
		if !p.lease {
			pending = append(pending, w.seen.identity(p))
		}
	}
	slices.Sort(pending)
	return sha256.Sum256([]byte(strings.Join(append(all, pending...), "\x00")))
}
