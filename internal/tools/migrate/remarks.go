// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"strconv"
	"strings"
	"time"
)

// remarks are the notes about what the manifest around a new container means for it.
type remarks struct{ *group }

func (g remarks) add() {
	g.noteOverlap()
	g.noteAnnotations()
	g.noteGracePeriod()
	g.noteLimits()
}

// noteOverlap warns about a rollout during which the old and the new pod are both active.
func (g remarks) noteOverlap() {
	strategy := text(get(g.object.node, "spec", "strategy", "type"))
	if !g.elects() && text(get(g.object.node, "kind")) == "Deployment" && strategy != "Recreate" &&
		!g.sources[0].on(g.m.Tables, "node-deployment") {
		g.note("without --leader-election the old and the new pod are both active during the rollout of a Deployment. " +
			"Set strategy.type to Recreate, or --leader-election=true before and after the migration")
	}
}

// noteGracePeriod warns if the kubelet may kill the process while it finishes its calls.
func (g remarks) noteGracePeriod() {
	grace := 30 * time.Second
	if n := text(get(g.object.pod, "terminationGracePeriodSeconds")); n != "" {
		seconds, err := strconv.Atoi(n)
		if err != nil {
			return
		}
		grace = time.Duration(seconds) * time.Second
	}
	var longest time.Duration
	for _, s := range g.replaced() {
		f, _ := s.lookup("timeout")
		if d, err := time.ParseDuration(f.expanded); err == nil {
			longest = max(longest, d)
		}
	}
	if needed := longest + 10*time.Second; grace < needed {
		g.note("a call may last %v (--timeout), and the pod is killed %v after SIGTERM: the Lease is then not released, and a standby "+
			"waits until it expires. Set terminationGracePeriodSeconds to %d or more", longest, grace, int(needed.Seconds()))
	}
}

// noteLimits notes that the limits of requests of the sidecars do not apply.
func (g remarks) noteLimits() {
	var without []string
	for _, s := range g.replaced() {
		if _, set := s.lookup("kube-api-qps"); !set && s.kind != livenessprobe {
			without = append(without, s.name)
		}
	}
	if len(without) > 0 {
		g.note("%s had at most 5 requests per second to the API server by default; storage-controller has no limit. "+
			"Set --kube-api-qps and --kube-api-burst to keep one", enumerate(without))
	}
}

// noteAnnotations warns about annotations of the pod that name a removed container.
func (g remarks) noteAnnotations() {
	annotations := get(g.object.node, "spec", "template", "metadata", "annotations")
	for i := 0; annotations != nil && i+1 < len(annotations.Content); i += 2 {
		key, value := annotations.Content[i].Value, annotations.Content[i+1].Value
		for _, s := range g.replaced() {
			switch {
			case s.name == g.name:
			case value == s.name && strings.HasPrefix(key, "kubectl.kubernetes.io/default-"):
				g.note("the annotation %s names %s, which was removed. Set it to %s", key, s.name, g.name)
			case key == "container.apparmor.security.beta.kubernetes.io/"+s.name:
				g.note("the annotation %s names %s, which was removed: the API server rejects the pod. "+
					"Remove the annotation or replace its last part with %s", key, s.name, g.name)
				g.m.rejected = true
			}
		}
	}
}
