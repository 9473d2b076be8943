package nodecontroller

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestNodeIsBackAsAnotherMachine warns when a node comes back under its name on a machine
// that is not the one before, and does nothing but that.
func TestNodeIsBackAsAnotherMachine(t *testing.T) {
	for name, c := range map[string]struct {
		before, after string
		finalizer     bool // the notes are written while the node is going, which ends with the time for that
		warned        bool
	}{
		"another machine":               {before: "one", after: "two", warned: true},
		"another machine, by finalizer": {before: "one", after: "two", finalizer: true, warned: true},
		"the same machine":              {before: "one", after: "one"},
		"unknown before":                {after: "two"},
		"unknown after":                 {before: "one"},
	} {
		t.Run(name, func(t *testing.T) {
			f := scenario(t, func(f *fixture) {
				if c.finalizer {
					f.cfg.NodeFinalizerMode, f.cfg.NodeDeleteGrace, f.cfg.NodeFinalizerTimeout = NodeFinalizerRemove, time.Hour, time.Second
				}
			})
			if c.finalizer {
				f.node("n", f.cfg.NodeFinalizer)
			} else {
				f.node("n")
			}
			f.patchNode("n", `{"status":{"nodeInfo":{"machineID":"`+c.before+`"}}}`, "status")
			_, claim := f.bound("a", "n")
			f.onlyWrites("PATCH persistentvolumes/pv-a", "PATCH nodes/n")
			f.start()
			f.seen("pv-a", placeHealthy)
			f.deleteNode("n")
			noted := f.untilVolume("pv-a", "is missing its node", f.isMissing)
			if machine := noted.Annotations[f.ann.lostMachine]; machine == c.before && c.before != "" || (machine == "") != (c.before == "") {
				t.Errorf("noted as machine %q", machine)
			}
			back := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: f.name("n"), Labels: map[string]string{f.key: f.name("n")}}}
			back.Status.NodeInfo.MachineID = c.after // which the kubelet reports when it registers
			_, err := f.client.CoreV1().Nodes().Create(t.Context(), back, metav1.CreateOptions{})
			f.must(err)
			f.untilVolume("pv-a", "has no notes", f.c.policy.notedNothing)
			f.event("PersistentVolume", f.name("pv-a"), reasonReturned, f.name("n"))
			if c.warned {
				f.event("PersistentVolume", f.name("pv-a"), reasonIdentity, f.name("n"))
				f.event("PersistentVolumeClaim", claim.Name, reasonIdentity, f.name("n"))
			} else if said := f.events("PersistentVolume", f.name("pv-a"), reasonIdentity); len(said) > 0 {
				t.Errorf("warned: %q", said)
			}
			f.untouched(claim)
		})
	}
}
