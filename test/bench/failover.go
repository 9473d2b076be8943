// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// The defaults of both sides for leader election.
const (
	leaseDuration = 15 * time.Second
	retryPeriod   = 5 * time.Second
)

// cluster is where the failover is measured.
type cluster struct {
	volumes int // of the driver, attached
	claims  int // waiting for a volume, so that a call is due
	rounds  int // of each signal
}

// failover is the result of both sides.
type failover struct {
	Volumes  int         `json:"volumes"`
	Claims   int         `json:"claims"`
	Lease    string      `json:"leaseDuration"`
	Takeover [2]takeover `json:"sides"`
}

// takeover is the time from a signal to the leader until the first call of the standby, in each round.
type takeover struct {
	Term []float64 `json:"sigtermSeconds"`
	Kill []float64 `json:"sigkillSeconds"`
}

// measureFailover measures both sides on one control plane.
func measureFailover(ctx context.Context, o options, sides [2]side, in cluster) (*failover, error) {
	ctx, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	o.nodes, o.foreign, o.phases = memoryNodes, 0, nil
	b, err := setUp(ctx, o, kubetest.Config{}, lifeOfVolumes...)
	if err != nil {
		return nil, err
	}
	defer b.tearDown()
	say("creating %d volumes of the driver", in.volumes)
	if err := b.prepare(ctx); err != nil {
		return nil, err
	}
	if err := each(ctx, in.volumes, func(ctx context.Context, i int) error {
		return b.create(ctx, b.driver, fmt.Sprintf("own-%d", i), node(i%o.nodes))
	}); err != nil {
		return nil, err
	}
	if err := b.claims(ctx, in.claims); err != nil {
		return nil, err
	}
	f := &failover{Volumes: in.volumes, Claims: in.claims, Lease: leaseDuration.String()}
	for s, side := range sides {
		say("measuring the failover of %s", side.Versions)
		f.Takeover[s], err = b.takeovers(ctx, side, in.rounds)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", side.Name, err)
		}
	}
	return f, nil
}

// claims creates claims that wait for a volume of the driver.
func (b *bench) claims(ctx context.Context, n int) error {
	return each(ctx, n, func(ctx context.Context, i int) error {
		pvc := claim(fmt.Sprintf("waiting-%d", i))
		pvc.Annotations = map[string]string{annProvisioner: b.driver}
		_, err := b.client.CoreV1().PersistentVolumeClaims(namespace).Create(ctx, pvc, metav1.CreateOptions{})
		return err
	})
}

// takeovers measures one side. The standby of a round is the leader of the next one.
func (b *bench) takeovers(ctx context.Context, s side, rounds int) (t takeover, err error) {
	var replicas []*replica
	defer func() {
		if err != nil {
			for _, r := range replicas {
				err = fmt.Errorf("%w%s", err, r.tails())
			}
		}
		for _, r := range replicas {
			r.end()
		}
	}()
	leader, err := b.replica(ctx, s, 0)
	if err != nil {
		return t, err
	}
	replicas = append(replicas, leader)
	if err := leader.plugin.Wait(ctx, "CreateVolume", 1); err != nil {
		return t, err
	}
	for round := range 2 * rounds {
		standby, err := b.replica(ctx, s, round+1)
		if err != nil {
			return t, err
		}
		replicas = append(replicas, standby)
		if err := standby.quiet(ctx); err != nil {
			return t, err
		}
		if err := pause(ctx, spread(round/2, rounds)); err != nil {
			return t, err
		}
		signal, times := syscall.SIGTERM, &t.Term
		if round%2 == 1 {
			signal, times = syscall.SIGKILL, &t.Kill
		}
		sent := time.Now()
		for _, pid := range leader.pids {
			if err := syscall.Kill(pid, signal); err != nil {
				return t, fmt.Errorf("sending %v to the leader: %w", signal, err)
			}
		}
		if err := standby.plugin.Wait(ctx, "CreateVolume", 1); err != nil {
			return t, err
		}
		took := time.Since(sent)
		say("%v: %.2f s", signal, took.Seconds())
		*times = append(*times, took.Seconds())
		leader.end()
		leader, replicas = standby, replicas[1:]
	}
	return t, nil
}

// spread returns a delay for a round. A standby reads the Lease after a random time between once and 2.2 times the retry period, so
// the delays of all rounds are spread over the longest.
func spread(round, rounds int) time.Duration {
	longest := 2.2 * float64(retryPeriod)
	return time.Duration(longest * (float64(round) + 0.5) / float64(rounds))
}

// replica is one of several replicas of a side, each with its own instance of the driver.
type replica struct {
	bench
	stop func()
}

// replica starts a replica with leader election. Its driver refuses each volume, so that the claims wait.
func (b *bench) replica(ctx context.Context, s side, number int) (*replica, error) {
	r := &replica{bench: *b}
	r.host = fmt.Sprintf("replica-%d", number)
	var err error
	r.dir, err = os.MkdirTemp(b.dir, r.host+"-")
	if err != nil {
		return nil, err
	}
	r.socket = filepath.Join(r.dir, "csi.sock")
	r.plugin = csitest.New(csitest.Config{Name: b.driver, DiscardCalls: true, NoNodeExpansion: true, Controller: lifeOfVolumes})
	r.plugin.Always("CreateVolume", csitest.Fail(codes.InvalidArgument, "the claims wait"))
	if err := r.plugin.Start(r.socket); err != nil {
		return nil, err
	}
	var commands sidecars
	for _, command := range s.Commands {
		commands = append(commands, fmt.Sprintf("%s --leader-election --leader-election-lease-duration=%v "+
			"--leader-election-retry-period=%v", command, leaseDuration, retryPeriod))
	}
	r.stop, err = r.start(ctx, commands, "POD_NAME="+r.host)
	if err != nil {
		r.plugin.Stop()
		return nil, err
	}
	return r, nil
}

// quiet returns when the replica has started: it has used less than a tenth of a processor for a second.
func (r *replica) quiet(ctx context.Context) error {
	if err := pause(ctx, idle); err != nil {
		return err
	}
	for before := r.begin(); ; {
		if err := pause(ctx, time.Second); err != nil {
			return err
		}
		after := r.begin()
		if after.cpu-before.cpu < 0.1 {
			return nil
		}
		before = after
	}
}

// end ends the processes of the replica that are left, and its driver.
func (r *replica) end() {
	r.stop()
	r.plugin.Stop()
}

// failover renders how long a standby takes to take over.
func (c *comparison) failover() string {
	f := c.Failover
	var b strings.Builder
	fmt.Fprintf(&b, "%d volumes of the driver, %d waiting claims, Leases of %s. Seconds from the signal to the leader until the first "+
		"CreateVolume call of the standby, which had started before. Median of %d, with the smallest and the largest:\n\n",
		f.Volumes, f.Claims, f.Lease, len(f.Takeover[ours].Term))
	b.WriteString(c.conditions())
	b.WriteString("| | SIGTERM | SIGKILL |\n|---|---|---|\n")
	for s, t := range f.Takeover {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", c.Sides[s].Name, withRange(t.Term), withRange(t.Kill))
	}
	return b.String()
}
