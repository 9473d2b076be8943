// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// results is what a run has measured.
type results struct {
	Commands []string `json:"commands"`
	Volumes  int      `json:"volumes"`
	Nodes    int      `json:"nodes"`
	Foreign  int      `json:"foreign"`
	Latency  string   `json:"latency"`
	Start    phase    `json:"start"`
	Idle     phase    `json:"idle"`
	Phases   []phase  `json:"phases"`
}

// phase is one part of a run; everything but the times is of the sidecars alone, unless it names another process.
type phase struct {
	Name             string         `json:"name"`
	Seconds          float64        `json:"seconds"`
	VolumesPerSecond float64        `json:"volumesPerSecond"`
	P50              float64        `json:"p50Seconds"`
	P99              float64        `json:"p99Seconds"`
	CPUSeconds       float64        `json:"cpuSeconds"`
	APIServerSeconds float64        `json:"kubeAPIServerCPUSeconds"` // for all clients
	EtcdSeconds      float64        `json:"etcdCPUSeconds"`
	ResidentBytes    int64          `json:"residentBytes"`
	BytesRead        int64          `json:"bytesRead"`
	Requests         map[string]int `json:"requests"` // by verb and resource
	Calls            map[string]int `json:"calls"`    // by CSI method

	last time.Time // of the requests, apart from those for Leases
}

// extend moves the end of a phase of n volumes to the last request of the sidecars, so that the rate is of the time in which CPU
// and requests were counted.
func (p *phase) extend(begin time.Time, n int) {
	if until := p.last.Sub(begin).Seconds(); until > p.Seconds {
		p.Seconds, p.VolumesPerSecond = until, float64(n)/until
	}
}

// sample is the state of the counters at a time.
type sample struct {
	at       time.Time
	cpu      float64
	api      float64 // CPU of kube-apiserver
	etcd     float64
	resident int64
	read     int64
	audit    int64
	calls    map[string]int
}

var csiMethods = []string{"CreateVolume", "ControllerPublishVolume", "ControllerUnpublishVolume", "DeleteVolume", "GetCapacity",
	"ControllerExpandVolume", "ControllerModifyVolume", "CreateSnapshot", "DeleteSnapshot"}

func (b *bench) begin() sample {
	s := sample{at: time.Now(), calls: map[string]int{}, resident: b.memory("VmRSS:"),
		api: cpuSeconds(b.cp.PID(kubetest.APIServer)), etcd: cpuSeconds(b.cp.PID(kubetest.Etcd))}
	for _, pid := range b.pids {
		s.cpu += cpuSeconds(pid)
		s.read += field(fmt.Sprintf("/proc/%d/io", pid), "rchar:")
	}
	s.audit, _ = b.cp.AuditOffset() // a log that cannot be read is an error at the end of the phase
	if b.plugin != nil {
		for _, m := range csiMethods {
			s.calls[m] = b.plugin.Count(m)
		}
	}
	return s
}

func (b *bench) end(begin sample, name string, n int, took time.Duration, latencies []time.Duration) phase {
	return b.between(begin, b.begin(), name, n, took, latencies)
}

// between returns the phase between two samples.
func (b *bench) between(begin, end sample, name string, n int, took time.Duration, latencies []time.Duration) phase {
	p := phase{
		Name: name, Seconds: took.Seconds(), VolumesPerSecond: float64(n) / took.Seconds(),
		CPUSeconds: end.cpu - begin.cpu, APIServerSeconds: end.api - begin.api, EtcdSeconds: end.etcd - begin.etcd,
		ResidentBytes: end.resident, BytesRead: end.read - begin.read,
		Requests: map[string]int{}, Calls: map[string]int{},
	}
	if len(latencies) > 0 {
		slices.Sort(latencies)
		p.P50, p.P99 = latencies[len(latencies)/2].Seconds(), latencies[len(latencies)*99/100].Seconds()
	}
	records, err := b.cp.AuditSince(begin.audit, "")
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench: reading the audit log:", err)
	}
	for _, r := range records {
		if r.Answered.After(end.at) {
			continue
		}
		if r.Object.Resource != "" && !ofControlPlane(r.UserAgent) && (r.Verb != "watch" || r.Stage == "ResponseStarted") {
			p.Requests[r.Verb+" "+r.Resource()]++
			if r.Object.Resource != "leases" && r.Answered.After(p.last) {
				p.last = r.Answered
			}
		}
	}
	for m, count := range end.calls {
		if c := count - begin.calls[m]; c > 0 {
			p.Calls[m] = c
		}
	}
	return p
}

// memory returns a value of /proc/PID/status in bytes, summed over the sidecars.
func (b *bench) memory(word string) (bytes int64) {
	for _, pid := range b.pids {
		bytes += field(fmt.Sprintf("/proc/%d/status", pid), word) * 1024
	}
	return bytes
}

// ofControlPlane tells whether a request is one of the control plane, or of the bench.
func ofControlPlane(agent string) bool {
	for _, prefix := range []string{"kube-controller-manager", "kube-scheduler", "kube-apiserver", "controlplane", userAgent,
		"kubetest.test", "bench/", "Go-http-client"} {
		if strings.HasPrefix(agent, prefix) {
			return true
		}
	}
	return false
}

// cpuSeconds is what a process has used so far.
func cpuSeconds(pid int) float64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.ParseFloat(fields[11], 64)
	system, _ := strconv.ParseFloat(fields[12], 64)
	return (user + system) / 100 // clock ticks, of which Linux shows 100 a second
}

// field is the number behind a word in a file of /proc.
func field(file, word string) int64 {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == word {
			n, _ := strconv.ParseInt(fields[1], 10, 64)
			return n
		}
	}
	return 0
}

// life returns the sum of the phases. The phase bound contains the phase created.
func (r *results) life() phase {
	whole := phase{Name: "whole life", Requests: map[string]int{}}
	for _, p := range r.Phases {
		if p.Name == created {
			continue
		}
		whole.Seconds += p.Seconds
		whole.CPUSeconds += p.CPUSeconds
		whole.APIServerSeconds += p.APIServerSeconds
		whole.EtcdSeconds += p.EtcdSeconds
		whole.BytesRead += p.BytesRead
		whole.ResidentBytes = p.ResidentBytes
		for request, n := range p.Requests {
			whole.Requests[request] += n
		}
	}
	whole.VolumesPerSecond = float64(r.Volumes) / whole.Seconds
	return whole
}

// table prints r for people.
func (r *results) table(out io.Writer) {
	fmt.Fprintf(out, "\n%d volumes, %d nodes, driver latency %s, %d volumes of other drivers\n", r.Volumes, r.Nodes, r.Latency, r.Foreign)
	for _, c := range r.Commands {
		fmt.Fprintf(out, "measured: %s\n", c)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\nphase\tseconds\tvolumes/s\tp50 s\tp99 s\tCPU s\tkube-apiserver\tetcd\tRSS MiB\tread MiB\t")
	life := r.life()
	for _, p := range slices.Concat([]phase{r.Start, r.Idle}, r.Phases, []phase{life}) {
		fmt.Fprintf(w, "%s\t%.2f\t%.0f\t%.3f\t%.3f\t%.2f\t%.2f\t%.2f\t%.1f\t%.1f\t\n", p.Name, p.Seconds, p.VolumesPerSecond,
			p.P50, p.P99, p.CPUSeconds, p.APIServerSeconds, p.EtcdSeconds,
			float64(p.ResidentBytes)/(1<<20), float64(p.BytesRead)/(1<<20))
	}
	w.Flush()
	fmt.Fprintf(out, "\nCPU per volume, whole life: %.2f ms\n", life.CPUSeconds*1000/float64(r.Volumes))
	for _, p := range r.Phases {
		fmt.Fprintf(out, "%-10s calls per volume: %s; requests per volume: %s\n", p.Name, per(p.Calls, r.Volumes),
			per(p.Requests, r.Volumes))
	}
}

func per(counts map[string]int, n int) string {
	var items []string
	for _, k := range slices.Sorted(maps.Keys(counts)) {
		items = append(items, fmt.Sprintf("%s %.2f", k, float64(counts[k])/float64(n)))
	}
	return strings.Join(items, ", ")
}
