// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/tools/statusz"
)

// attempts selects the attempts for an object: by queue, a function that reports whether a key concerns the object.
type attempts map[string]func(key string) bool

// inQueues selects one key of queues.
func inQueues(key string, queues ...string) attempts {
	a := attempts{}
	for _, queue := range queues {
		a[queue] = func(k string) bool { return k == key }
	}
	return a
}

// explainProcess reports what a running process works on: calls of the driver for one of volumes, and attempts for the
// object.
func explainProcess(e *explanation, roles []string, of attempts, volumes ...string) {
	p := e.process
	if p == nil {
		return
	}
	if p.err != nil {
		e.unknown("process", "Cannot read the status page at %s: %s", p.url, sentence(p.err.Error()))
		return
	}
	for _, r := range p.page.Roles {
		if slices.Contains(roles, r.Name) && r.Lease != nil && !r.Lease.Leader {
			e.ok("process",
				"The %s at %s is a standby: %q holds Lease %s. Query that replica.", r.Name, p.url, r.Lease.Holder, r.Lease.Lease)
		}
	}
	before := len(e.findings)
	explainCalls(e, p.page, volumes)
	explainAttempts(e, p.page, of)
	if len(e.findings) > before {
		return
	}
	for _, queue := range p.page.Loops {
		if of[queue.Name] != nil && queue.Failures > len(queue.Failing) {
			e.unknown("process", "The process at %s shows %d of %d keys in back-off in queue %s, and none of this object.", p.url,
				len(queue.Failing), queue.Failures, queue.Name)
		}
	}
	if len(e.findings) == before {
		e.ok("process", "The process at %s reports no running or failed attempt for this object.", p.url)
	}
}

func explainCalls(e *explanation, page statusz.Page, volumes []string) {
	d := page.Driver
	if d == nil {
		return
	}
	if d.NotReady != "" {
		e.blocked("process",
			"The driver is not ready: %s", sentence(d.NotReady)).SetNext("Check why the driver does not respond on its socket.")
	}
	for _, c := range d.Running {
		if c.Volume != "" && slices.Contains(volumes, c.Volume) {
			e.waiting("process", "%s for %q has been in flight for %s.", c.Method, c.Volume, duration.HumanDuration(page.Now.Sub(c.Began))).
				SetNext("The call ends with the response of the driver, or at its deadline.")
		}
	}
	for _, c := range d.Failed { // newest first
		if c.Volume != "" && slices.Contains(volumes, c.Volume) {
			e.failing("process", "%s for %q failed %s ago after %s with %s: %s", c.Method, c.Volume,
				duration.HumanDuration(page.Now.Sub(c.Began.Add(c.Took))), c.Took.Round(time.Millisecond), c.Code, sentence(c.Error))
			break
		}
	}
}

// explainLimits reports the limits of calls for which an attempt may wait.
func explainLimits(e *explanation, page statusz.Page) {
	if page.Driver == nil {
		return
	}
	for _, l := range page.Driver.Limits {
		if l.Waiting > 0 {
			e.waiting("process", "%s has been limited to %s at a time for %s, and others wait: %d. Cause: %s", l.Method,
				finding.Plural(l.Limit, "call"), duration.HumanDuration(page.Now.Sub(l.Since)), l.Waiting, sentence(l.Reason)).
				SetNext("The driver seems to be overloaded. --adaptive-concurrency=false ends this limit.")
		}
	}
}

// queueAndStage names a queue, and the stage of the object there if the controller has stages.
func queueAndStage(queue, stage string) string {
	if stage == "" {
		return "queue " + queue
	}
	return "queue " + queue + ", stage " + stage
}

func explainAttempts(e *explanation, page statusz.Page, of attempts) {
	for _, queue := range page.Loops {
		concerns := of[queue.Name]
		if concerns == nil {
			continue
		}
		for _, r := range queue.Running {
			if concerns(r.Key) {
				e.waiting("process", "An attempt has been in progress for %s (%s).", duration.HumanDuration(page.Now.Sub(r.Since)),
					queueAndStage(queue.Name, r.Stage))
				explainLimits(e, page)
			}
		}
		for _, k := range queue.Failing {
			if !concerns(k.Key) {
				continue
			}
			f := failure{text: k.Error, by: "container", again: " now"}
			if k.Next.After(page.Now) {
				f.again = " in " + duration.HumanDuration(k.Next.Sub(page.Now))
			}
			e.failed("process", f, "%s in a row (%s), next attempt%s", finding.Plural(k.Attempts, "failed attempt"),
				queueAndStage(queue.Name, k.Stage), f.again)
		}
	}
}
