// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// backlog is what the attacher has to do when the attaches come, as in an upgrade of all nodes.
type backlog struct {
	detaches, nodes, attaches int
	each                      time.Duration // time of a detach
	every                     time.Duration // time between two attaches
}

// pressure is the result of both sides with a backlog of detaches.
type pressure struct {
	Detaches int        `json:"detaches"`
	Nodes    int        `json:"nodes"`
	Attaches int        `json:"attaches"`
	Each     string     `json:"detachTakes"`
	Every    string     `json:"attachEvery"`
	Sides    [2]waiting `json:"sides"`
}

// waiting is how long attaches took beside the detaches.
type waiting struct {
	P50      float64 `json:"p50Seconds"`
	P99      float64 `json:"p99Seconds"`
	Max      float64 `json:"maxSeconds"`
	Detached float64 `json:"detachesPerSecond"` // until the last attach
}

// measurePressure measures both sides, each with a control plane of its own.
func measurePressure(ctx context.Context, o options, sides [2]side, load backlog) (*pressure, error) {
	p := &pressure{Detaches: load.detaches, Nodes: load.nodes, Attaches: load.attaches, Each: load.each.String(),
		Every: load.every.String()}
	for s, side := range sides {
		say("measuring attaches of %s beside %d detaches", side.Versions, load.detaches)
		var err error
		p.Sides[s], err = measureBacklog(ctx, o, side, load)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", side.Name, err)
		}
	}
	return p, nil
}

// measureBacklog measures one side.
func measureBacklog(ctx context.Context, o options, s side, load backlog) (w waiting, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	o.nodes, o.foreign, o.phases = load.nodes, 0, nil
	b, err := setUp(ctx, o, kubetest.Config{}, lifeOfVolumes...)
	if err != nil {
		return w, err
	}
	defer b.tearDown()
	answers := func(response any, after time.Duration) csitest.Step { // the driver has no volumes
		return func(ctx context.Context, p *csitest.Plugin, request any, _ func() (any, error)) (any, error) {
			return csitest.Delay(after)(ctx, p, request, func() (any, error) { return response, nil })
		}
	}
	b.plugin.Always("ControllerUnpublishVolume", answers(&csi.ControllerUnpublishVolumeResponse{}, load.each))
	b.plugin.Always("ControllerPublishVolume", answers(&csi.ControllerPublishVolumeResponse{}, 0))
	if err := b.prepare(ctx); err != nil {
		return w, err
	}
	if err := each(ctx, load.detaches, func(ctx context.Context, i int) error {
		return b.create(ctx, b.driver, detached(i), node(i%load.nodes))
	}); err != nil {
		return w, err
	}
	if err := each(ctx, load.attaches+1, func(ctx context.Context, i int) error {
		_, err := b.createVolume(ctx, b.driver, attached(i))
		return err
	}); err != nil {
		return w, err
	}
	stop, err := b.start(ctx, s.Commands)
	if err != nil {
		return w, err
	}
	defer stop()
	w, err = b.attachBesideDetaches(ctx, load)
	if err != nil {
		err = fmt.Errorf("%w%s", err, b.tails())
	}
	return w, err
}

func detached(i int) string { return fmt.Sprintf("detach-%d", i) }
func attached(i int) string { return fmt.Sprintf("attach-%d", i) }

// attachBesideDetaches requests all detaches, and then the attaches one after the other. The first attach, before them, shows that
// the caches are complete.
func (b *bench) attachBesideDetaches(ctx context.Context, load backlog) (w waiting, err error) {
	done := newTimes()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	b.watch(watching, done)
	attach := func(i int) (time.Duration, error) {
		began := time.Now()
		if err := b.attach(ctx, attached(i), attached(i), node(i%load.nodes)); err != nil {
			return 0, err
		}
		at, err := done.wait(ctx, "attach "+attached(i))
		return at.Sub(began), err
	}
	if _, err := attach(load.attaches); err != nil {
		return w, err
	}
	began, calls := time.Now(), b.plugin.Count("ControllerUnpublishVolume")
	if err := each(ctx, load.detaches, func(ctx context.Context, i int) error {
		return b.client.StorageV1().VolumeAttachments().Delete(ctx, detached(i), metav1.DeleteOptions{})
	}); err != nil {
		return w, err
	}
	took, failed := make([]time.Duration, load.attaches), make([]error, load.attaches)
	var wg sync.WaitGroup
	for i := range load.attaches {
		wg.Go(func() { took[i], failed[i] = attach(i) })
		if err := pause(ctx, load.every); err != nil {
			return w, err
		}
	}
	wg.Wait()
	for _, err := range failed {
		if err != nil {
			return w, err
		}
	}
	slices.Sort(took)
	n := len(took)
	w.P50, w.P99, w.Max = took[n/2].Seconds(), took[n*99/100].Seconds(), took[n-1].Seconds()
	w.Detached = float64(b.plugin.Count("ControllerUnpublishVolume")-calls) / time.Since(began).Seconds()
	return w, nil
}

// pressure renders how long attaches take beside detaches.
func (c *comparison) pressure() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d detaches on %d nodes are requested at once; the driver takes %s for each. Then one of %d attaches is requested "+
		"every %s; the driver answers at once:\n\n", c.Pressure.Detaches, c.Pressure.Nodes, c.Pressure.Each, c.Pressure.Attaches,
		c.Pressure.Every)
	b.WriteString(c.conditions())
	b.WriteString("| | attach: p50 s | p99 s | maximum s | detach calls/s |\n|---|---|---|---|---|\n")
	for s, w := range c.Pressure.Sides {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", c.Sides[s].Name, number(w.P50), number(w.P99), number(w.Max), number(w.Detached))
	}
	return b.String()
}
