// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// memoryNodes is the number of nodes where memory is measured.
const memoryNodes = 500

// footprint is the memory of both sides with a number of volumes, each with PVC and VolumeAttachment.
type footprint struct {
	Own      int      `json:"ownVolumes"`
	Foreign  int      `json:"volumesOfOtherDrivers"`
	Resident [2]int64 `json:"residentBytes"` // while nothing changes
	Peak     [2]int64 `json:"peakBytes"`     // since the start of the process
	// Start is the time from the start of the processes until a volume is provisioned and attached.
	Start [2]float64 `json:"startSeconds"`
	CPU   [2]float64 `json:"cpuSeconds"` // with the time without changes
}

// measureMemory measures both sides with volumes of other drivers and, on another control plane, with more
// and more volumes of their own.
func measureMemory(ctx context.Context, o options, sides [2]side) ([]footprint, error) {
	var foreign []footprint
	if o.compare.foreign > 0 {
		var err error
		if foreign, err = measureFootprints(ctx, o, sides, o.compare.foreign, 0); err != nil {
			return nil, err
		}
	}
	own, err := measureFootprints(ctx, o, sides, 0, append([]int{0}, o.compare.memory...)...)
	return append(own, foreign...), err
}

// measureFootprints measures both sides for each number of own volumes, in increasing order.
func measureFootprints(ctx context.Context, o options, sides [2]side, foreign int, own ...int) (all []footprint, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	o.nodes, o.foreign, o.phases = memoryNodes, foreign, nil
	// Without the kube-controller-manager, which would take longer to bind the volumes than the bench to create them.
	b, err := setUp(ctx, o, kubetest.Config{}, lifeOfVolumes...)
	if err != nil {
		return nil, err
	}
	defer b.tearDown()
	say("creating %d nodes and %d volumes of other drivers", o.nodes, foreign)
	if err := b.prepare(ctx); err != nil {
		return nil, err
	}
	have := 0
	for _, n := range own {
		say("creating %d volumes of the driver", n-have)
		if err := each(ctx, n-have, func(ctx context.Context, i int) error {
			return b.create(ctx, b.driver, fmt.Sprintf("own-%d", have+i), node(i%o.nodes))
		}); err != nil {
			return nil, err
		}
		have = n
		f := footprint{Own: n, Foreign: foreign}
		for s, side := range sides {
			say("measuring the memory of %s", side.Versions)
			if err := b.footprint(ctx, s, side, &f); err != nil {
				return nil, fmt.Errorf("%s with %d volumes: %w", side.Name, n, err)
			}
		}
		all = append(all, f)
	}
	return all, nil
}

// footprint starts side s, provisions and attaches a volume, and measures the side into f.
func (b *bench) footprint(ctx context.Context, s int, side side, f *footprint) error {
	began := time.Now()
	stop, err := b.start(ctx, side.Commands)
	if err != nil {
		return err
	}
	defer stop()
	if err := b.provisionAndAttach(ctx); err != nil {
		return fmt.Errorf("%w%s", err, b.tails())
	}
	f.Start[s] = time.Since(began).Seconds()
	if err := pause(ctx, idle); err != nil {
		return err
	}
	f.Resident[s], f.Peak[s] = b.memory("VmRSS:"), b.memory("VmHWM:")
	for _, pid := range b.pids {
		f.CPU[s] += cpuSeconds(pid)
	}
	return nil
}

// provisionAndAttach returns when the sidecars, whose caches are complete then, have provisioned and attached a
// volume. The bench does the part of the kube-controller-manager.
func (b *bench) provisionAndAttach(ctx context.Context) error {
	claims := b.client.CoreV1().PersistentVolumeClaims(namespace)
	pvc := claim("")
	pvc.GenerateName = "probe-"
	pvc.Annotations = map[string]string{annProvisioner: b.driver}
	pvc, err := claims.Create(ctx, pvc, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	volume := "pvc-" + string(pvc.UID)
	if err := kubetest.Await(ctx, func(ctx context.Context) error {
		_, err := b.client.CoreV1().PersistentVolumes().Get(ctx, volume, metav1.GetOptions{})
		return err
	}); err != nil {
		return err
	}
	bind := []byte(`{"spec":{"volumeName":"` + volume + `"}}`)
	if _, err := claims.Patch(ctx, pvc.Name, types.MergePatchType, bind, metav1.PatchOptions{}); err != nil {
		return err
	}
	if err := b.attach(ctx, pvc.Name, volume, node(0)); err != nil {
		return err
	}
	return kubetest.Await(ctx, func(ctx context.Context) error {
		va, err := b.client.StorageV1().VolumeAttachments().Get(ctx, pvc.Name, metav1.GetOptions{})
		if err == nil && !va.Status.Attached {
			return errors.New("the volume is not attached")
		}
		return err
	})
}
