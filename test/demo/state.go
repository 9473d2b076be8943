// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// state is what there is: of each thing, by its name, how it is.
type state struct {
	claims, volumes, pods, attachments, directories, snapshots map[string]string
	running                                                    int
}

// state looks at everything.
func (d *demo) state(ctx context.Context) (state, error) {
	s := state{claims: map[string]string{}, volumes: map[string]string{}, pods: map[string]string{}, attachments: map[string]string{},
		directories: map[string]string{}, snapshots: map[string]string{}}
	claims, err := d.client.CoreV1().PersistentVolumeClaims(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return s, err
	}
	for _, c := range claims.Items {
		s.claims[c.Name] = strings.ToLower(string(c.Status.Phase))
		if node := c.Annotations["volume.kubernetes.io/selected-node"]; node != "" && c.Status.Phase == corev1.ClaimPending {
			s.claims[c.Name] = "waits for a volume near " + node
		}
	}
	name := map[string]string{} // of the claim of a volume, which says more than that of the volume, and may be deleted before it
	volumes, err := d.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return s, err
	}
	for _, v := range volumes.Items {
		if v.Spec.ClaimRef != nil {
			name[v.Name] = v.Spec.ClaimRef.Name
		}
		s.volumes[v.Name] = strings.ToLower(string(v.Status.Phase))
		if v.Spec.NodeAffinity != nil {
			s.volumes[v.Name] += " in zone " + v.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Values[0]
		}
	}
	pods, err := d.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return s, err
	}
	s.running = kubetest.Running(pods.Items)
	for _, p := range pods.Items {
		s.pods[p.Name] = strings.ToLower(string(p.Status.Phase))
		if p.Spec.NodeName != "" {
			s.pods[p.Name] += " on " + p.Spec.NodeName
		}
	}
	attachments, err := d.client.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{})
	if err != nil {
		return s, err
	}
	for _, a := range attachments.Items {
		key := name[*a.Spec.Source.PersistentVolumeName] + " to " + a.Spec.NodeName
		switch {
		case a.DeletionTimestamp != nil:
			s.attachments[key] = "detaching"
		case a.Status.Attached:
			s.attachments[key] = "attached"
		default:
			s.attachments[key] = "attaching"
		}
	}
	files, err := os.ReadDir(d.root())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return s, err
	}
	for _, f := range files {
		switch {
		case f.IsDir() && strings.HasPrefix(f.Name(), "snap-"):
			s.snapshots[f.Name()] = "exists"
		case f.IsDir():
			s.directories[f.Name()] = "exists"
		}
	}
	return s, nil
}

// want is nil when there are so many volumes, with bound claims and directories,
// attachments, and running pods.
func (s state) want(volumes, attachments, pods int) error {
	bound, attached := 0, 0
	for _, phase := range s.claims {
		if phase == "bound" {
			bound++
		}
	}
	for _, a := range s.attachments {
		if a == "attached" {
			attached++
		}
	}
	if volumes == 0 && len(s.snapshots) > 0 {
		return fmt.Errorf("there are snapshots %v", s.snapshots)
	}
	if bound != volumes || len(s.claims) != volumes || len(s.volumes) != volumes || len(s.directories) != volumes ||
		attached != attachments || len(s.attachments) != attachments || s.running != pods || len(s.pods) != pods {
		return fmt.Errorf("wanted %d volumes, %d attachments and %d pods; there are %d claims (%d bound), %d PersistentVolumes, %d "+
			"directories, %d attachments (%d attached), %d pods (%d running)",
			volumes, attachments, pods, len(s.claims), bound, len(s.volumes), len(s.directories), len(s.attachments), attached, len(s.pods),
			s.running)
	}
	return nil
}

// watch prints changes until done is satisfied with the state.
func (d *demo) watch(ctx context.Context, begin time.Time, done func(state) error) error {
	return kubetest.Await(ctx, func(ctx context.Context) error {
		now, err := d.state(ctx)
		if err != nil {
			return err
		}
		for _, kind := range []struct {
			name          string
			before, after map[string]string
		}{
			{"claim", d.last.claims, now.claims}, {"pod", d.last.pods, now.pods}, {"directory", d.last.directories, now.directories},
			{"snapshot", d.last.snapshots, now.snapshots},
			{"volume", d.last.volumes, now.volumes}, {"attachment of", d.last.attachments, now.attachments},
		} {
			for _, line := range changes(kind.name, kind.before, kind.after) {
				fmt.Printf("  %6.2f s  %s\n", time.Since(begin).Seconds(), line)
			}
		}
		d.last = now
		return done(now)
	})
}

// changes is a line for each thing that came, went or changed.
func changes(kind string, before, after map[string]string) []string {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(after)) {
		if before[name] != after[name] {
			lines = append(lines, fmt.Sprintf("%s %s: %s", kind, name, after[name]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if _, still := after[name]; !still {
			lines = append(lines, fmt.Sprintf("%s %s: gone", kind, name))
		}
	}
	return lines
}
