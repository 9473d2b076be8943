// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package resizer

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestResizerScenarioMany: the numbers of calls and writes of many claims. The tests of this file run last: their objects
// stay, and each resizer of a later test would list them.
func TestResizerScenarioMany(t *testing.T) {
	t.Run("019_expand_200", func(t *testing.T) {
		const n = 200
		f := scenario(t, expands, nil)
		f.each(n, func(name string) { f.create(name, nil) })
		f.each(n, func(name string) { f.request(name, "2Gi") })
		f.each(n, func(name string) { f.reaches(name, "C=1Gi A=2Gi "+pending+" P=2Gi PRE=1Gi "+waitNode) })
		f.counts(n, 3)
		f.each(n, func(name string) { f.nodeExpands(name) })
		f.each(n, func(name string) { f.reaches(name, "C=2Gi A=2Gi P=2Gi") })
		f.counts(n, 1)
		f.Calls(expandMethod, n)
		f.Calls("ControllerGetCapabilities", 1)
	})
	t.Run("065_modify_200", func(t *testing.T) {
		const n = 200
		f := scenario(t, modifies, nil)
		f.classes()
		f.each(n, func(name string) { f.create(name, nil) })
		f.each(n, func(name string) { f.requestClass(name, "gold") })
		f.each(n, func(name string) { f.reaches(name, "C=1Gi K=gold P=1Gi PV=gold") })
		f.counts(n, 3)
		f.Calls(modifyMethod, n)
	})
	t.Run("052_restart_with_1000_finished_claims", func(t *testing.T) {
		const n = 1000
		f := newFixture(t, both, nil)
		f.each(n, func(name string) {
			f.create(name, func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
				c.Spec.Resources.Requests, c.Status.Capacity, pv.Spec.Capacity = storage("2Gi"), storage("2Gi"), storage("2Gi")
				c.Status.AllocatedResources = storage("2Gi")
			})
		})
		f.start()
		if added := f.samples("workqueue_adds_total", "name", f.Driver+"-pvc"); added != 0 {
			t.Errorf("%d keys were queued, want 0", added)
		}
		f.wrote("")
		f.Calls(expandMethod, 0)
	})
}
