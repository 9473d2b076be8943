package explain

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/topology"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// reportNode says what becomes of a node and of the volumes that live on it.
func reportNode(f *facts, name string) Report {
	drivers := f.driversOfNode(name)
	var l findings
	l = append(l, f.aboutPresence(name)...)
	for _, d := range drivers {
		l = append(l, f.aboutDriverOnNode(name, d)...)
	}
	l = append(l, f.aboutNodeDeletion(drivers)...)
	l = append(l, f.aboutNodeAttachments(name)...)
	for _, lease := range f.leases {
		l = append(l, f.aboutLease(lease)...)
	}
	l = append(l, f.aboutProcess([]string{"nodecontroller"}, []string{"nodecontroller-node"}, name)...)
	r := Report{Kind: KindNode, Name: name, Driver: f.driver, Findings: l, State: f.stateOfNode(name), Finalizers: []Finalizer{}, Next: l.next("Nothing is left to do: volumes can be attached to the node.")}
	if f.node.found {
		r.Finalizers = finalizersOf(KindNode, f.node.value.Finalizers, drivers...)
	}
	r.Events, r.EventsUnknown = f.eventsOf()
	return r
}

func (f *facts) stateOfNode(name string) string {
	if !f.node.found {
		return fmt.Sprintf("Node %q does not exist any more, and is still named by volumes, attachments or a CSINode.", name)
	}
	node := f.node.value
	text := fmt.Sprintf("The node was created %s", f.ago(node.CreationTimestamp.Time))
	if node.DeletionTimestamp != nil {
		text += fmt.Sprintf("; it was deleted %s and is kept by its finalizers", f.ago(node.DeletionTimestamp.Time))
	}
	return text + "."
}

// driversOfNode is the drivers that are registered on a node, or have volumes that live
// on it, sorted.
func (f *facts) driversOfNode(name string) []string {
	var drivers []string
	if f.csiNode.found {
		for _, d := range f.csiNode.value.Spec.Drivers {
			drivers = append(drivers, d.Name)
		}
	}
	for _, pv := range f.volumesOfNode(name) {
		drivers = append(drivers, migration.DriverOfVolume(&pv))
	}
	slices.Sort(drivers)
	return slices.DeleteFunc(slices.Compact(drivers), func(d string) bool { return d == "" })
}

// volumesOfNode is the CSI volumes that can be used on this node and no other; for one that
// is gone, those whose affinity or notes name it and that no other node can have.
func (f *facts) volumesOfNode(name string) []corev1.PersistentVolume {
	var result []corev1.PersistentVolume
	for _, pv := range f.volumes.value {
		if pv.Spec.CSI == nil {
			continue
		}
		hosts, known := f.nodesOf(&pv)
		lost := strings.Split(nodecontroller.NotesOf(pv.Spec.CSI.Driver, pv.Annotations).LostNode, ",")
		switch {
		case !known:
		case len(hosts) == 1 && hosts[0] == name:
			result = append(result, pv)
		case len(hosts) == 0 && (slices.Contains(lost, name) || affinityNames(&pv, name)):
			result = append(result, pv)
		}
	}
	return result
}

// affinityNames tells whether the node affinity of pv has value.
func affinityNames(pv *corev1.PersistentVolume, value string) bool {
	for _, t := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms {
		for _, e := range slices.Concat(t.MatchExpressions, t.MatchFields) {
			if e.Operator == corev1.NodeSelectorOpIn && slices.Contains(e.Values, value) {
				return true
			}
		}
	}
	return false
}

// aboutPresence is whether the node is there, well, and free of taints that matter here.
func (f *facts) aboutPresence(name string) findings {
	var l findings
	if !f.node.found {
		l.add(Failing, "node", admin+" brings the node back under its name, or gives up what was on it; see the volumes below.", "Node %q does not exist.", name)
		return l
	}
	for _, c := range f.node.value.Status.Conditions {
		if c.Type != corev1.NodeReady {
			continue
		}
		if c.Status == corev1.ConditionTrue {
			l.add(Fine, "node", "", "The node is Ready.")
		} else {
			l.add(Failing, "node", admin+" brings the node back, or deletes it if it will not return: as long as it exists the nodecontroller only reports.",
				"The node has not been Ready %s: %s", f.since(c.LastTransitionTime.Time), sentence(c.Message))
		}
	}
	for _, t := range f.node.value.Spec.Taints {
		switch t.Key {
		case corev1.TaintNodeOutOfService:
			l.add(Failing, "taint", admin+" removes the taint once the node is back, or deletes the node.",
				"Taint %s says that the node is shut down: Kubernetes deletes its pods and detaches its volumes at once. It does not say that its disks are lost.", t.Key)
		case corev1.TaintNodeUnreachable, corev1.TaintNodeNotReady:
			l.add(Waiting, "taint", "", "Taint %s (%s) is on the node.", t.Key, t.Effect)
		case corev1.TaintNodeUnschedulable:
			l.add(Fine, "taint", "", "The node is cordoned (taint %s): no new pods, and so no new volumes, come to it.", t.Key)
		default:
			l.add(Fine, "taint", "", "Taint %s=%s (%s) is on the node.", t.Key, t.Value, t.Effect)
		}
	}
	return l
}

// aboutDriverOnNode is a driver's registration, its volumes and the state of the clean-up.
func (f *facts) aboutDriverOnNode(name, driver string) findings {
	var l findings
	entry := kube.DriverOnNode(f.csiNode.value, driver)
	switch {
	case f.csiNode.why != "":
		l.add(Unknown, "driver", "", "Whether driver %s is on the node is %s.", driver, f.csiNode.why)
	case entry == nil && f.node.found:
		l.add(Failing, "driver", admin+" looks why the node part of driver "+driver+" does not run there.", "Driver %s is not registered on the node, and has volumes there.", driver)
	case f.node.found:
		if segment, missing := topology.OfNode(f.node.value.Labels, entry.TopologyKeys); missing != nil {
			l.add(Failing, "topology", admin+" labels the node, or restarts the node part of driver "+driver+" there, which does.", "The node lacks topology labels of driver %s: %s.", driver, strings.Join(missing, ", "))
		} else {
			l.add(Fine, "driver", "", "Driver %s is registered on the node as %q%s.", driver, entry.NodeID, topologyText(segment))
		}
		if entry.Allocatable != nil && entry.Allocatable.Count != nil {
			l.add(Fine, "driver", "", "At most %s of driver %s can be attached to the node.", count(int(*entry.Allocatable.Count), "volume"), driver)
		}
	}
	if f.volumes.why != "" {
		l.add(Unknown, "volume", "", "Which volumes live on the node is %s.", f.volumes.why)
		return l
	}
	f.aboutVolumesThere(&l, name, driver)
	return l
}

func (f *facts) aboutVolumesThere(l *findings, name, driver string) {
	var names []string
	for _, pv := range f.volumesOfNode(name) {
		if migration.DriverOfVolume(&pv) == driver {
			names = append(names, pv.Name)
			*l = append(*l, f.aboutCleanUpOf(&pv)...)
		}
	}
	if len(names) > 0 {
		l.add(Fine, "volume", "", "%s of driver %s %s on this node and nowhere else: %s.", count(len(names), "volume"), driver, verb(len(names), "lives", "live"), list(names))
	}
	if f.node.found {
		f.aboutNodeNotes(l, driver)
	}
	if f.csiDriver.found && f.csiDriver.value.Name == driver && !f.node.found {
		f.aboutApproval(l, name)
	}
}

// aboutNodeNotes is what the administrator has said of the node.
func (f *facts) aboutNodeNotes(l *findings, driver string) {
	notes := nodecontroller.NotesOf(driver, f.node.value.Annotations)
	if notes.Cleanup == "disabled" {
		l.add(Fine, "clean-up", "", "The node has opted out of the clean-up for driver %s (annotation %s).", driver, nodecontroller.CleanupAnnotation(driver))
	}
	if notes.LocalData == "lost" {
		l.add(Failing, "clean-up", "The nodecontroller cleans up once the node is tainted as out of service and is not Ready for long enough, if it is told to.", "The administrator has declared the data on the node lost, for driver %s.", driver)
	}
}

func (f *facts) aboutApproval(l *findings, name string) {
	driver := f.csiDriver.value.Name
	approved, err := nodecontroller.Approved(driver, f.csiDriver.value.Annotations, name, f.now)
	if err != nil {
		l.add(Failing, "clean-up", admin+" corrects the annotation of CSIDriver "+driver+".", "%s", sentence(upper(err.Error())))
	}
	if approved {
		l.add(Fine, "clean-up", "", "The administrator has approved the loss of the node (annotation %s of CSIDriver %s). If the node has been back since, that does not hold for its next loss before its name is taken out there and put in again.", nodecontroller.ApproveAnnotation(driver), driver)
	}
}

// aboutCleanUpOf is what the nodecontroller has noted on a volume.
func (f *facts) aboutCleanUpOf(pv *corev1.PersistentVolume) findings {
	var l findings
	driver := migration.DriverOfVolume(pv)
	if driver == "" {
		return l
	}
	notes := nodecontroller.NotesOf(driver, pv.Annotations)
	since := "since " + notes.MissingSince
	if t, err := time.Parse(time.RFC3339, notes.MissingSince); err == nil {
		since = f.since(t)
	}
	if notes.Cleanup == "disabled" {
		l.add(Fine, "clean-up", "", "PersistentVolume %q has opted out of the clean-up of lost nodes.", pv.Name)
	}
	switch {
	case notes.Hold != "":
		l.add(Blocked, "clean-up", admin+" looks whether so many nodes are lost indeed, and approves them then: `kubectl annotate csidriver "+driver+" "+nodecontroller.ApproveAnnotation(driver)+"="+notes.LostNode+"`.",
			"The clean-up of PersistentVolume %q, whose node %s is lost, is held (%s): too many nodes are lost at the same time.", pv.Name, notes.LostNode, notes.Hold)
	case notes.MissingSince != "":
		l.add(Waiting, "clean-up", "The nodecontroller cleans up once the node is missing for longer than --node-missing-grace, if its mode and the opt-in allow that; the return of the node ends it.",
			"The node %s of PersistentVolume %q has been missing %s.", notes.LostNode, pv.Name, since)
	case notes.LostNode != "":
		l.add(Waiting, "clean-up", "The nodecontroller cleans up once the Node and its CSINode are gone and the time for that is over.", "The node %s of PersistentVolume %q was deleted.", notes.LostNode, pv.Name)
	}
	return l
}

// aboutNodeDeletion is what keeps a node that was deleted.
func (f *facts) aboutNodeDeletion(drivers []string) findings {
	var l findings
	if !f.node.found || f.node.value.DeletionTimestamp == nil {
		return l
	}
	for _, z := range finalizersOf(KindNode, f.node.value.Finalizers, drivers...) {
		next := upper(z.By) + " removes finalizer " + z.Name + " " + z.When + "."
		if strings.HasPrefix(z.By, "unknown") {
			next = admin + " asks whoever runs what finalizer " + z.Name + " belongs to."
		}
		l.add(Waiting, "deletion", next, "The node was deleted, and finalizer %s keeps it.", z.Name)
	}
	return l
}

// aboutNodeAttachments is what is attached to the node.
func (f *facts) aboutNodeAttachments(name string) findings {
	var l findings
	if f.attachments.why != "" {
		l.add(Unknown, "attachment", "", "What is attached to the node is %s.", f.attachments.why)
		return l
	}
	attached := 0
	for _, va := range f.attachments.value {
		if va.Status.Attached {
			attached++
		}
	}
	errs := f.addAttachmentErrors(&l)
	if n := len(f.attachments.value); n > 0 {
		severity, next := Fine, ""
		if !f.node.found {
			severity, next = Waiting, "kube-controller-manager deletes the attachments of the node once its pods are gone, and the attacher detaches the volumes."
		}
		l.add(severity, "attachment", next, "%s for node %q, %d of which %s attached, and %d with errors.", count(n, "VolumeAttachment"), name, attached, verb(attached, "is", "are"), errs)
	}
	return l
}

// maxErrors is how many different errors of the attachments of a node are told.
const maxErrors = 10

// addAttachmentErrors adds the errors of the attachments of a node, each once, and returns
// how many attachments have one.
func (f *facts) addAttachmentErrors(l *findings) int {
	type failure struct{ verb, message string }
	same, order := map[failure][]string{}, []failure{}
	last := map[failure]time.Time{}
	errs := 0
	for _, va := range f.attachments.value {
		verb, e := "attached", va.Status.AttachError
		if va.DeletionTimestamp != nil {
			verb, e = "detached", va.Status.DetachError
		} else if va.Status.Attached {
			continue
		}
		if e == nil {
			continue
		}
		errs++
		kind := failure{verb, sentence(e.Message)}
		if same[kind] == nil {
			order = append(order, kind)
		}
		if e.Time.After(last[kind]) {
			last[kind] = e.Time.Time
		}
		same[kind] = append(same[kind], va.Name)
	}
	told := 0
	for _, kind := range order[:min(len(order), maxErrors)] {
		names := same[kind]
		who := "VolumeAttachment " + names[0]
		if more := len(names) - 1; more > 0 {
			who += fmt.Sprintf(" and %d more", more)
		}
		told += len(names)
		l.add(Failing, "attachment", "The attacher tries again by itself: ask `storage-controller explain va "+names[0]+"`.", "%s cannot be %s, %s: %s", who, kind.verb, f.ago(last[kind]), kind.message)
	}
	if left := errs - told; left > 0 {
		l.add(Failing, "attachment", "", "%s with other errors: `kubectl get volumeattachments -o yaml` has them.", count(left, "more VolumeAttachment"))
	}
	return errs
}
