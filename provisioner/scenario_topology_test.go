// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// anywhere is a driver that is aware of topology and makes volumes wherever it is told.
var anywhere = csitest.Config{Plugin: []csi.PluginCapability_Service_Type{
	csi.PluginCapability_Service_CONTROLLER_SERVICE, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS,
}}

// label is the key of a label that no nodes but those of the fixture have.
func (f *fixture) label(key string) string { return f.Namespace + "/" + key }

// places is nodes with the driver: in zones only, or in zones and racks as "z1 A".
func (f *fixture) places(where ...string) {
	f.Helper()
	var wg sync.WaitGroup
	queue := make(chan func())
	for range 8 {
		wg.Go(func() {
			for work := range queue {
				work()
			}
		})
	}
	for i, place := range where {
		queue <- func() {
			spec := kubetest.NodeSpec{Name: f.nodeName(i), Labels: map[string]string{}, Driver: f.Driver}
			for j, value := range strings.Fields(place) {
				key := f.label([]string{"zone", "rack"}[j])
				spec.Labels[key], spec.TopologyKeys = value, append(spec.TopologyKeys, key)
			}
			if err := kubetest.CreateNode(f.Context(), f.Client, spec); err != nil {
				f.Error(err)
			}
		}
	}
	close(queue)
	wg.Wait()
	if f.Failed() {
		f.FailNow()
	}
	for i := range where {
		f.seesNode(i)
	}
}

// seesNode waits until the provisioner knows a node as it is now.
func (f *fixture) seesNode(i int) {
	f.Helper()
	if !f.c.driver.topology {
		return
	}
	node, err := f.Client.CoreV1().Nodes().Get(f.Context(), f.nodeName(i), metav1.GetOptions{})
	f.Must(err)
	kubetest.Eventually(f.T, node.Name+" is seen", func(context.Context) error {
		t := f.c.claimLoop.Load()
		if t == nil {
			return errors.New("nothing runs yet")
		}
		labels, _ := t.topologies.Labels(node.Name)
		if _, ok := t.topologies.Keys(node.Name); !ok || !maps.Equal(labels, node.Labels) {
			return fmt.Errorf("its labels are %v, seen are %v, CSINode %t", node.Labels, labels, ok)
		}
		return nil
	})
}

func (f *fixture) nodeName(i int) string { return fmt.Sprintf("%s-node-%d", f.Namespace, i) }

// placement is a claim, and where its volume is asked for. Topologies are as text
// gives them, without the prefix of the keys.
type placement struct {
	claim                string     // its name; empty: any
	node                 int        // the selected one and late binding, counted from 1; 0: none
	allowed              [][]string // key and values
	requisite, preferred string     // both empty: no requirement
	fails                []string   // or not at all
}

// place has all placements provisioned side by side.
func (f *fixture) place(all map[string]placement) {
	f.Helper()
	variants := map[string]variant{}
	for name, p := range all {
		v := variant{fails: p.fails, class: func(c *storagev1.StorageClass) {
			var expressions []corev1.TopologySelectorLabelRequirement
			for _, a := range p.allowed {
				expressions = append(expressions, in(f.label(a[0]), a[1:]...))
			}
			if expressions != nil {
				c.AllowedTopologies = allow(expressions...)
			}
			if p.node > 0 {
				late(c)
			}
		}, claim: func(c *corev1.PersistentVolumeClaim) {
			if p.claim != "" {
				c.Name = p.claim
			}
			if p.node > 0 {
				c.Annotations[storagehelpers.AnnSelectedNode] = f.nodeName(p.node - 1)
			}
		}}
		if p.fails == nil {
			v.check = func(o outcome) bool {
				r := o.request.AccessibilityRequirements
				plain := func(t []*csi.Topology) string { return strings.ReplaceAll(text(t), f.label(""), "") }
				return plain(r.GetRequisite()) == p.requisite && plain(r.GetPreferred()) == p.preferred && (r == nil) == (p.requisite == "")
			}
		}
		variants[name] = v
	}
	f.variants(variants)
}

func provisionerScenarioTopology(t *testing.T) {
	const three = "zone=z1; zone=z2; zone=z3"
	t.Run("072_not_supported", func(t *testing.T) {
		for name, tt := range map[string]struct {
			plugin csitest.Config
			gate   bool
		}{"no_capability": {csitest.Config{}, true}, "gate_off": {anywhere, false}} {
			t.Run(name, func(t *testing.T) {
				f := scenario(t, tt.plugin, func(c *Config) { c.Topology = tt.gate })
				f.places("z1")
				f.Plugin.Always(create, accessible(map[string]string{"zone": "z1"}))
				none := func(o outcome) bool {
					return o.request.AccessibilityRequirements == nil && o.pv.Spec.NodeAffinity == nil
				}
				f.variants(map[string]variant{
					"immediate": {check: none},
					"allowed": {class: func(c *storagev1.StorageClass) { c.AllowedTopologies = allow(in(f.label("zone"), "z1")) },
						check: none},
					"late": {class: late, claim: annotated(map[string]string{storagehelpers.AnnSelectedNode: f.nodeName(0)}), check: none},
				})
			})
		}
	})
	t.Run("zones", func(t *testing.T) {
		f := scenario(t, anywhere, nil)
		f.places("z3", "z2", "z1")
		f.place(map[string]placement{
			"073_stateful_0":       {claim: "data-web-0", requisite: three, preferred: three},
			"073_stateful_1":       {claim: "data-web-1", requisite: three, preferred: "zone=z2; zone=z3; zone=z1"},
			"073_stateful_10":      {claim: "data-my-db-10", requisite: three, preferred: "zone=z3; zone=z1; zone=z2"},
			"073_plain":            {claim: "testpvc", requisite: three, preferred: "zone=z3; zone=z1; zone=z2"},
			"073_number_too_large": {claim: "claim-4294967296", requisite: three, preferred: "zone=z3; zone=z1; zone=z2"},
			"073_allowed": {claim: "testset-2", allowed: [][]string{{"zone", "z4", "z1"}}, requisite: "zone=z1; zone=z4",
				preferred: "zone=z4; zone=z1"},
			"075_late": {node: 2, requisite: three, preferred: "zone=z2; zone=z3; zone=z1"},
			"075_late_allowed": {node: 1, allowed: [][]string{{"zone", "z2", "z3"}}, requisite: "zone=z2; zone=z3",
				preferred: "zone=z3; zone=z2"},
			"078_node_is_not_allowed":    {node: 3, allowed: [][]string{{"zone", "z2", "z3"}}, fails: []string{f.nodeName(2), "allowed"}},
			"078_nowhere_in_the_cluster": {node: 3, allowed: [][]string{{"zone", "z9"}}, fails: []string{f.nodeName(2), "allowed"}},
			"078_allowed_by_another_key": {node: 3, allowed: [][]string{{"zone", "z1"}, {"rack", "A"}},
				fails: []string{f.nodeName(2), "allowed"}},
		})
	})
	t.Run("zones_strict", func(t *testing.T) {
		f := scenario(t, anywhere, func(c *Config) { c.StrictTopology = true })
		f.places("z1", "z2", "z3")
		f.place(map[string]placement{
			"075_strict": {node: 2, requisite: "zone=z2", preferred: "zone=z2"},
			"075_strict_allowed": {node: 2, allowed: [][]string{{"zone", "z1", "z2"}}, requisite: "zone=z2",
				preferred: "zone=z2"},
			"073_strict_is_for_late_binding": {claim: "data-web-1", requisite: three, preferred: "zone=z2; zone=z3; zone=z1"},
			"078_strict": {node: 3, allowed: [][]string{{"zone", "z1", "z2"}},
				fails: []string{f.nodeName(2), "allowed"}},
		})
	})
	t.Run("zones_not_immediate", func(t *testing.T) {
		f := scenario(t, anywhere, func(c *Config) { c.ImmediateTopology = false })
		f.places("z1", "z2", "z3")
		f.place(map[string]placement{
			"074_absent": {},
			"074_allowed": {claim: "data-web-1", allowed: [][]string{{"zone", "z3", "z1"}}, requisite: "zone=z1; zone=z3",
				preferred: "zone=z1; zone=z3"},
			"074_late": {node: 3, requisite: three, preferred: "zone=z3; zone=z1; zone=z2"},
		})
	})
	t.Run("racks", func(t *testing.T) {
		f := scenario(t, anywhere, nil)
		f.places("z2 A", "z1 A", "z1 B")
		f.place(map[string]placement{
			"076_no_allowed": {node: 1, requisite: "rack=A,zone=z1; rack=A,zone=z2; rack=B,zone=z1",
				preferred: "rack=A,zone=z2; rack=B,zone=z1; rack=A,zone=z1"},
			"076_allowed": {node: 1, allowed: [][]string{{"zone", "z1", "z2"}, {"rack", "A", "B"}},
				requisite: "rack=A,zone=z1; rack=A,zone=z2; rack=B,zone=z1; rack=B,zone=z2",
				preferred: "rack=A,zone=z2; rack=B,zone=z1; rack=B,zone=z2; rack=A,zone=z1"},
			"076_allowed_with_fewer_keys": {node: 3, allowed: [][]string{{"zone", "z2", "z1"}}, requisite: "zone=z1; zone=z2",
				preferred: "zone=z1; zone=z2"},
		})
	})
	t.Run("racks_strict", func(t *testing.T) {
		f := scenario(t, anywhere, func(c *Config) { c.StrictTopology = true })
		f.places("z2 A", "z1 B")
		f.place(map[string]placement{
			"076_strict_allowed_with_fewer_keys": {node: 2, allowed: [][]string{{"zone", "z1"}}, requisite: "rack=B,zone=z1",
				preferred: "rack=B,zone=z1"},
		})
	})
	t.Run("077_duplicates", func(t *testing.T) {
		f := scenario(t, anywhere, nil)
		var where []string
		for i := range 100 {
			where = append(where, fmt.Sprint("z", i%3+1))
		}
		f.places(where...)
		f.place(map[string]placement{
			"immediate": {claim: "data-web-0", requisite: three, preferred: three},
			"late":      {node: 100, requisite: three, preferred: three},
			"allowed":   {node: 2, allowed: [][]string{{"zone", "z2"}}, requisite: "zone=z2", preferred: "zone=z2"},
		})
	})
	t.Run("081_label_comes_later", func(t *testing.T) {
		f := scenario(t, anywhere, patient)
		f.places("z1 A", "z1 B")
		f.setLabel(1, "rack", "null")
		f.makeClass(late)
		for i, rack := range []string{`"B"`, `"A"`} { // a new place, and that of the other node
			claim := f.claim(func(c *corev1.PersistentVolumeClaim) {
				c.Name, c.Annotations[storagehelpers.AnnSelectedNode] = fmt.Sprint("data-", i), f.nodeName(1)
			})
			f.event("ProvisioningFailed", f.nodeName(1), f.label("rack"))
			for _, zone := range []string{`"z2"`, `"z3"`, `"z4"`, `"z5"`, `"z1"`} { // of no concern
				f.setLabel(0, "zone", zone)
			}
			f.looksAtAll()
			f.Calls(create, i)
			if n := len(f.events.Events); n > 0 {
				t.Errorf("%d events: %s", n, <-f.events.Events)
			}
			f.setLabel(1, "rack", rack)
			f.event("ProvisioningSucceeded")
			f.saved(claim)
			f.setLabel(1, "rack", "null")
		}
	})
	t.Run("084_accessible", func(t *testing.T) {
		f := scenario(t, anywhere, nil)
		f.places("z1")
		f.makeClass(nil)
		for i, tt := range []struct {
			answer []map[string]string
			want   string
		}{
			{[]map[string]string{{"zone": "z1"}, {"zone": "z2"}}, "zone In [z1]; zone In [z2]"},
			{[]map[string]string{{"zone": "z1", "rack": "A"}}, "rack In [A], zone In [z1]"},
			{[]map[string]string{{}, {"zone": "z2"}}, "zone In [z2]"},
			{[]map[string]string{{}, {}}, ""},
			{nil, ""},
		} {
			f.Plugin.Next(create, accessible(tt.answer...))
			pv := f.saved(f.claim(func(c *corev1.PersistentVolumeClaim) { c.Name = fmt.Sprint("data-", i) }))
			if got := affinityText(pv); got != tt.want || (pv.Spec.NodeAffinity == nil) != (tt.want == "") {
				t.Errorf("%v gives %q, want %q", tt.answer, got, tt.want)
			}
		}
	})
}

// accessible has the driver tell where a volume is.
func accessible(segments ...map[string]string) csitest.Step {
	return csitest.Alter(func(r *csi.CreateVolumeResponse) {
		r.Volume.AccessibleTopology = nil
		for _, s := range segments {
			r.Volume.AccessibleTopology = append(r.Volume.AccessibleTopology, &csi.Topology{Segments: s})
		}
	})
}

// setLabel changes a label of a node; "null" removes it.
func (f *fixture) setLabel(node int, key, json string) {
	f.Helper()
	_, err := f.Client.CoreV1().Nodes().Patch(f.Context(), f.nodeName(node), types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, f.label(key), json), metav1.PatchOptions{})
	f.Must(err)
	f.seesNode(node)
}

func affinityText(pv *corev1.PersistentVolume) string {
	if pv.Spec.NodeAffinity == nil {
		return ""
	}
	var terms []string
	for _, t := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms {
		var expressions []string
		for _, e := range t.MatchExpressions {
			expressions = append(expressions, fmt.Sprintf("%s %s %v", e.Key, e.Operator, e.Values))
		}
		terms = append(terms, strings.Join(expressions, ", "))
	}
	return strings.Join(terms, "; ")
}
