// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

// The label and the annotations of the ConfigMap.
const (
	// LabelDriver is the driver of a ConfigMap with lost nodes.
	LabelDriver = "storage-controller.io/driver"
	// AnnotationTopologyKey is the last known topology key, on the ConfigMap with lost nodes.
	AnnotationTopologyKey = "storage-controller.io/topology-key"
	// AnnotationLastLook is the time when all nodes of the ConfigMap with lost nodes were checked last.
	AnnotationLastLook = "storage-controller.io/last-look"
	// AnnotationMode is the mode of the leader, the value of --node-cleanup, on the ConfigMap with lost nodes.
	AnnotationMode = "storage-controller.io/mode"
	// AnnotationHolder identifies the leader that may write the ConfigMap with lost nodes. If it is removed or changed, the
	// leader releases its Lease, and the next leader sets it.
	AnnotationHolder = "storage-controller.io/holder"
	// AnnotationApprove lists lost nodes whose cleanup an administrator approves, on their ConfigMap, separated by commas. An
	// approval ends the grace and the hold. NODE=all also agrees to the deletion of what did not opt in. The controller moves
	// approvals into the records.
	AnnotationApprove = "storage-controller.io/approve"
	// annotationApproveUntil was the end of an approval. An approval that has it has no effect.
	annotationApproveUntil = "storage-controller.io/approve-until"
)

// approveAll follows a name in [AnnotationApprove] that is approved also for what did not opt in.
const approveAll = "=all"

// LostNode is the record of a host whose Node was deleted, or is being deleted.
type LostNode struct {
	Value       string    `json:"-"`                     // of the topology key; the key of the record
	Node        string    `json:"node,omitempty"`        // name of the Node; empty if no process has seen it
	UID         types.UID `json:"uid,omitempty"`         // of the Node
	Since       time.Time `json:"since,omitzero"`        // lists confirmed that no Node exists; zero: one may exist
	Restarted   time.Time `json:"restarted,omitzero"`    // a Node is being deleted that no process watched: its grace started again
	Planned     bool      `json:"planned,omitempty"`     // a drained Node was deleted: the breaker does not count it
	Held        string    `json:"held,omitempty"`        // [HeldByBreaker]: until an approval or the return of the Node
	Approved    time.Time `json:"approved,omitzero"`     // an administrator approved the cleanup of this loss
	ApprovedAll bool      `json:"approvedAll,omitempty"` // and of what did not opt in
	OptedOut    bool      `json:"optedOut,omitempty"`    // the Node, which may exist, opted out
	Acted       time.Time `json:"acted,omitzero"`        // last deletion, for the window of the breaker
	Next        string    `json:"next,omitempty"`        // what happens next, for people
	Unparsable  bool      `json:"-"`                     // the stored record cannot be parsed
	text        string    // the stored record, if it cannot be parsed: a person corrects it
}

// HeldByBreaker is the value of [LostNode.Held].
const HeldByBreaker = "breaker"

// maxNext is the number of records above which [LostNode.Next] is not stored: a ConfigMap holds 1 MiB.
const maxNext = 1000

// Records is the content of the ConfigMap.
type Records struct {
	Lost         map[string]LostNode // by value
	TopologyKey  string              // the last known one
	Checked      time.Time           // last check of all lost nodes; zero: none
	Holder       string              // identifies the leader that may write
	Mode         Mode                // of the leader
	Approve      []string            // approvals that are in no record yet: values or names of Nodes, some with approveAll
	ApproveUntil bool                // annotationApproveUntil is set
}

// ConfigMapName returns the name of the ConfigMap with the records of driver.
func ConfigMapName(driver string) string { return "lost-nodes." + strings.ToLower(driver) }

// isRecordable reports whether a record can have this host as its key.
func isRecordable(host string) bool { return host != "" && len(validation.IsConfigMapKey(host)) == 0 }

// ParseLostNodes returns the records of a ConfigMap, sorted by value. A record that cannot be parsed counts as held and opted
// out. One without a valid since starts its grace again.
func ParseLostNodes(cm *corev1.ConfigMap) []LostNode {
	var all []LostNode
	for _, value := range slices.Sorted(maps.Keys(cm.Data)) {
		type fields LostNode
		var r struct {
			fields
			Since any `json:"since"`
		}
		n := LostNode{Held: HeldByBreaker, OptedOut: true, Unparsable: true, text: cm.Data[value],
			Next: "Nothing is deleted, and further lost nodes are held. Correct or remove the record"}
		if json.Unmarshal([]byte(cm.Data[value]), &r) == nil {
			since, _ := r.Since.(string)
			n = LostNode(r.fields)
			_ = n.Since.UnmarshalText([]byte(since)) // zero unless it is a time
		}
		n.Value = value
		all = append(all, n)
	}
	return all
}

// parseRecords returns the content of a ConfigMap. nil has none.
func parseRecords(cm *corev1.ConfigMap) Records {
	r := Records{Lost: map[string]LostNode{}}
	if cm == nil {
		return r
	}
	for _, n := range ParseLostNodes(cm) {
		r.Lost[n.Value] = n
	}
	a := cm.Annotations
	r.TopologyKey, r.Holder, r.Mode = a[AnnotationTopologyKey], a[AnnotationHolder], Mode(a[AnnotationMode])
	r.Checked, _ = time.Parse(time.RFC3339, a[AnnotationLastLook])
	r.Approve = splitNames(a[AnnotationApprove])
	_, r.ApproveUntil = a[annotationApproveUntil]
	return r
}

// splitNames returns the names of an annotation, which separates them by commas.
func splitNames(text string) (names []string) {
	for name := range strings.SplitSeq(text, ",") {
		names = append(names, strings.TrimSpace(name))
	}
	return slices.DeleteFunc(names, func(name string) bool { return name == "" })
}

// configMap returns stored with r as its content, or a new ConfigMap of driver if stored is nil. Other annotations are kept.
func (r Records) configMap(stored *corev1.ConfigMap, namespace, driver string) (*corev1.ConfigMap, error) {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: ConfigMapName(driver)}}
	if len(validation.IsValidLabelValue(driver)) == 0 {
		cm.Labels = map[string]string{LabelDriver: driver}
	}
	if stored != nil {
		cm = stored.DeepCopy()
	}
	if cm.Annotations == nil {
		cm.Annotations = map[string]string{}
	}
	checked := ""
	if !r.Checked.IsZero() {
		checked = r.Checked.UTC().Format(time.RFC3339)
	}
	for name, text := range map[string]string{
		AnnotationTopologyKey: r.TopologyKey, AnnotationHolder: r.Holder, AnnotationMode: string(r.Mode), AnnotationLastLook: checked,
		AnnotationApprove: strings.Join(r.Approve, ","),
	} {
		cm.Annotations[name] = text
		if text == "" {
			delete(cm.Annotations, name)
		}
	}
	if !r.ApproveUntil {
		delete(cm.Annotations, annotationApproveUntil)
	}
	cm.Data = map[string]string{}
	for value, n := range r.Lost {
		if n.Unparsable {
			cm.Data[value] = n.text
			continue
		}
		if len(r.Lost) > maxNext {
			n.Next = ""
		}
		text, err := json.Marshal(n)
		if err != nil {
			return nil, fmt.Errorf("encoding the record of host %q: %w", value, err)
		}
		cm.Data[value] = string(text)
	}
	return cm, nil
}

// RecordState is what a [LostNode] means for the cleanup.
type RecordState string

// The states of records. The first one that applies is the state.
const (
	RecordUnparsable   RecordState = "unparsable"
	RecordOptedOutHeld RecordState = "opted out, held" // once it does not opt out, it is held
	RecordOptedOut     RecordState = "opted out"
	RecordHeld         RecordState = "held"
	RecordApproved     RecordState = "approved"
	RecordReturned     RecordState = "returned"      // after a cleanup that the breaker counts until its window ends
	RecordDeleting     RecordState = "being deleted" // or a CSINode exists
	RecordMissing      RecordState = "missing"
)

// State returns the state of a record.
func (n LostNode) State() RecordState {
	switch {
	case n.Unparsable:
		return RecordUnparsable
	case n.OptedOut && n.Held != "":
		return RecordOptedOutHeld
	case n.OptedOut:
		return RecordOptedOut
	case n.Held != "":
		return RecordHeld
	case !n.Approved.IsZero():
		return RecordApproved
	case n.returned():
		return RecordReturned
	case n.Since.IsZero():
		return RecordDeleting
	}
	return RecordMissing
}

// returned reports whether the Node exists again.
func (n LostNode) returned() bool {
	n.Next = ""
	return n == LostNode{Value: n.Value, Acted: n.Acted} && !n.Acted.IsZero()
}

// Name returns the best known name of the Node.
func (n LostNode) Name() string { return cmp.Or(n.Node, n.Value) }

// opens reports whether a record keeps the breaker open, because its host waits for an approval or a correction. A host that
// opted out does not wait.
func (n LostNode) opens() bool { return n.Unparsable || n.Held != "" && !n.OptedOut }

// exempt reports whether the breaker does not hold a loss, however many nodes are lost. It ends no hold.
func (n LostNode) exempt() bool { return n.Planned || !n.Approved.IsZero() }

// interrupted returns the record of a loss that may have ended. A later absence has its full grace, and neither an approval
// nor a planned removal applies to it.
func (n LostNode) interrupted() LostNode {
	n.Since, n.Approved, n.ApprovedAll, n.Planned = time.Time{}, time.Time{}, false, false
	return n
}

// approve moves the approvals into the records. It returns the values of the approved records, and a problem for each approval
// without effect.
func (r *Records) approve(s Settings, now time.Time) (approved []string, problems []Reason) {
	for _, entry := range r.Approve {
		name, all := strings.CutSuffix(entry, approveAll)
		var found []string
		for value, n := range r.Lost {
			if (name == value || name == n.Node) && !n.Unparsable && !n.returned() {
				found = append(found, value)
			}
		}
		problem := ""
		switch {
		case name == "*" || r.ApproveUntil:
			problem = "the value * and " + annotationApproveUntil + " were removed. Name the nodes"
		case !s.Deletes():
			problem = "the mode of the cleanup deletes nothing. Set --node-cleanup=claims or volumes"
		case r.Lost[name].Unparsable:
			problem = "its record cannot be parsed"
		case len(found) == 0:
			problem = "no such node is lost"
		}
		if problem != "" {
			problems = append(problems, Reason{Check: CheckGrace, Name: "ApprovalWithoutEffect", Message: fmt.Sprintf(
				"%s: %s has no effect: %s", AnnotationApprove, entry, problem)})
			continue
		}
		for _, value := range found {
			n := r.Lost[value]
			if n.Approved.IsZero() || n.Held != "" {
				n.Approved = now.UTC().Truncate(time.Second)
			}
			n.Held, n.ApprovedAll = "", n.ApprovedAll || all
			r.Lost[value] = n
		}
		approved = append(approved, found...)
	}
	r.Approve, r.ApproveUntil = nil, false
	return approved, problems
}

// equal reports whether r and other have the same content.
func (r Records) equal(other Records) bool {
	return maps.Equal(r.Lost, other.Lost) && r.TopologyKey == other.TopologyKey && r.Checked.Equal(other.Checked) &&
		r.Holder == other.Holder && r.Mode == other.Mode && slices.Equal(r.Approve, other.Approve) &&
		r.ApproveUntil == other.ApproveUntil
}

// withoutNext returns r without the sentences.
func (r Records) withoutNext() Records {
	r.Lost = maps.Clone(r.Lost)
	for value, n := range r.Lost {
		n.Next = ""
		r.Lost[value] = n
	}
	return r
}
