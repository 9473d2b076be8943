package nodecontroller

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

// registered has the driver report an ID on a node, "" for not being there.
func (f *fixture) registered(node, id string) {
	f.Helper()
	drivers := "[]"
	if id != "" {
		drivers = fmt.Sprintf(`[{"name":%q,"nodeID":%q,"topologyKeys":[%q]}]`, f.driver, f.name(id), f.key)
	}
	_, err := f.client.StorageV1().CSINodes().Patch(f.Context(), f.name(node), types.MergePatchType, []byte(`{"spec":{"drivers":`+drivers+`}}`), metav1.PatchOptions{})
	f.must(err)
}

// label sets the label of a node that tells what is on it; "" removes it.
func (f *fixture) label(node, value string) {
	f.Helper()
	text := "null"
	if value != "" {
		text = fmt.Sprintf("%q", f.name(value))
	}
	f.patchNode(node, fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, f.key, text))
}

// TestNodeThatIsThereByAnotherName has a Node exist whose volumes name it by what it is not
// called any more, or not where one would look first.
func TestNodeThatIsThereByAnotherName(t *testing.T) {
	begin := func(t *testing.T, change func(f *fixture)) (*fixture, *corev1.PersistentVolumeClaim) {
		f := scenario(t, change)
		f.labelled("n", "id")
		_, pvc := f.bound("a", "id")
		f.start()
		f.seen("pv-a", placeHealthy)
		return f, pvc
	}
	t.Run("label_is_lost", func(t *testing.T) {
		f, pvc := begin(t, nil)
		f.onlyWrites()
		f.label("n", "")
		f.staysFor(2*shortGrace, "pv-a", placeHealthy, pvc)
	})
	t.Run("label_is_lost_and_the_driver_is_away", func(t *testing.T) {
		f, pvc := begin(t, nil)
		f.label("n", "")
		f.registered("n", "")
		// It outlives the process, and ends when the node has its label again.
		f.untilVolume("pv-a", "says whose it is", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.lostNode] == f.name("n") })
		f.stop()
		f.start()
		f.staysFor(2*shortGrace, "pv-a", placeHealthy, pvc)
		f.label("n", "id")
		f.untilVolume("pv-a", "has no note", func(pv *corev1.PersistentVolume) bool { return pv.Annotations[f.ann.lostNode] == "" })
	})
	t.Run("driver_is_away_and_the_id_is_another", func(t *testing.T) {
		f, pvc := begin(t, nil)
		f.registered("n", "")
		f.label("n", "id2")
		f.registered("n", "id2")
		f.staysFor(2*shortGrace, "pv-a", placeHealthy, pvc)
		f.deleteNode("n")
		f.claimDeleted("a")
	})
	t.Run("label_of_the_only_candidate_is_lost", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.TopologyNodeKey = f.key })
		f.must(kubetest.CreateNode(t.Context(), f.client, kubetest.NodeSpec{Name: f.name("n"), Labels: map[string]string{f.key: f.name("rack")}, Driver: f.driver, TopologyKeys: []string{f.key}}))
		_, pvc := f.bound("a", "rack")
		f.label("n", "") // nobody has seen it before
		f.start()
		f.staysFor(2*shortGrace, "pv-a", placeUnclear, pvc)
		f.label("n", "other")
		f.claimDeleted("a")
	})
	t.Run("cleanup_command", func(t *testing.T) {
		f := scenario(t, nil)
		f.labelled("n", "id")
		_, pvc := f.bound("a", "id")
		f.label("n", "")
		var out bytes.Buffer
		err := Cleanup(t.Context(), f.cfg, f.recorded(), CleanupRequest{Driver: f.driver, Node: f.name("id"), Yes: true}, &out)
		if !errors.Is(err, ErrRefused) {
			t.Errorf("got %v\n%s", err, &out)
		}
		f.untouched(pvc)
	})
	t.Run("host_name_that_the_cache_does_not_know", func(t *testing.T) {
		f := scenario(t, func(f *fixture) { f.cfg.NodeMissingGrace = 3 * shortGrace })
		f.watchEndsFor("nodes")
		_, pvc := f.bound("a", "n")
		f.start()
		f.seen("pv-a", placeOrphan)
		f.must(kubetest.CreateNode(t.Context(), f.client, kubetest.NodeSpec{Name: f.name("nb")}))
		f.patchNode("nb", `{"status":{"addresses":[{"type":"Hostname","address":"`+f.name("n")+`"}]}}`, "status")
		f.staysFor(4*shortGrace, "pv-a", placeOrphan, pvc)
	})
	t.Run("empty_value", func(t *testing.T) {
		f := scenario(t, nil)
		_, pvc := f.boundTo("a", []string{"n"}, func(pv *corev1.PersistentVolume) {
			pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Values = []string{""}
		}, nil)
		f.start()
		f.staysFor(2*shortGrace, "pv-a", placeElsewhere, pvc)
	})
}

// TestRecordsByTheID has custom resources name a node that is there by the ID that the driver
// has for it.
func TestRecordsByTheID(t *testing.T) {
	f := scenario(t, func(f *fixture) {
		parity(f)
		f.cfg.NodeCleanupResourceSweep = shortGrace
	})
	records := f.installLogicalVolumes()
	f.must(kubetest.CreateNode(t.Context(), f.client, kubetest.NodeSpec{
		Name: f.name("n"), Labels: map[string]string{f.key: f.name("n")}, Driver: f.driver, TopologyKeys: []string{f.key}, NodeID: f.name("uuid"),
	}))
	f.logicalVolume(records, "lv", "uuid")
	f.start()
	f.lookedForRecords("uuid")
	f.there(records, "lv")
}
