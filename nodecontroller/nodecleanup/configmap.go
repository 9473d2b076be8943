// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
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
	// AnnotationApprove lists lost nodes whose cleanup an administrator approves, on their ConfigMap, separated by commas. NODE=all
	// includes volumes whose owners did not opt in. The controller moves approvals into the records.
	AnnotationApprove = "storage-controller.io/approve"
)

// approveAll follows a name in [AnnotationApprove] that is approved also for volumes whose owners did not opt in.
const approveAll = "=all"

// annotationApproveUntil was the end of an approval. An approval that has it has no effect.
const annotationApproveUntil = "storage-controller.io/approve-until"

// ConfigMapName returns the name of the ConfigMap with the records of driver.
func ConfigMapName(driver string) string { return "lost-nodes." + strings.ToLower(driver) }

// ReadLostNodes reads the records of driver from the ConfigMap in namespace, sorted by value. It
// returns none if there is no ConfigMap.
func ReadLostNodes(ctx context.Context, client kubernetes.Interface, namespace, driver string) ([]LostNode, error) {
	cm, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, ConfigMapName(driver), metav1.GetOptions{})
	if kube.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading ConfigMap \"%s/%s\": %w", namespace, ConfigMapName(driver), err)
	}
	return ParseLostNodes(cm), nil
}

// ParseLostNodes returns the records of a ConfigMap, sorted by value. A record that cannot be parsed
// counts as held and opted out. One without a valid since starts its grace again.
func ParseLostNodes(cm *corev1.ConfigMap) []LostNode {
	var all []LostNode
	for _, value := range slices.Sorted(maps.Keys(cm.Data)) {
		type fields LostNode
		var r struct {
			fields
			Since any `json:"since"`
		}
		n := LostNode{Held: HeldByBreaker, OptedOut: true, Unparsable: true}
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

// RecordState is what a [LostNode] means for the clean-up.
type RecordState string

// The states of records. The first one that applies is the state.
const (
	RecordUnparsable   RecordState = "unparsable"
	RecordOptedOutHeld RecordState = "opted out, held" // once it does not opt out, it is held
	RecordOptedOut     RecordState = "opted out"
	RecordHeld         RecordState = "held"
	RecordApproved     RecordState = "approved"
	RecordDeleting     RecordState = "being deleted" // or a CSINode exists
	RecordMissing      RecordState = "missing"
	RecordReturned     RecordState = "returned" // after a cleanup that the breaker counts until its window ends
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
	return n == LostNode{Value: n.Value, Acted: n.Acted} && !n.Acted.IsZero()
}

// agrees reports whether an administrator agreed to the clean-up of volumes whose owners did not opt in.
func (n LostNode) agrees() bool { return n.ApprovedAll && !n.Approved.IsZero() }

// Name returns the best known name of the Node.
func (n LostNode) Name() string { return cmp.Or(n.Node, n.Value) }

// version returns the resourceVersion of the ConfigMap that this term last read or wrote. It waits for a write that is under
// way, whose event may arrive before its response.
func (r *records) version() string {
	r.requestLock <- struct{}{}
	defer r.done()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cm == nil {
		return ""
	}
	return r.cm.ResourceVersion
}

// read replaces the records with those in the ConfigMap, if it exists. Call it between take and done, like write. Unless
// the check of the lost nodes calls it, it enqueues that check if the resourceVersion has changed: the event handler
// ignores a known resourceVersion.
func (r *records) read(ctx context.Context, byCheck bool) error {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	cm, err := r.client.CoreV1().ConfigMaps(r.namespace).Get(ctx, ConfigMapName(r.driver), metav1.GetOptions{})
	switch {
	case kube.IsNotFound(err):
		set := r.set.clone()
		delete(set.annotations, AnnotationApprove) // approvals end with the ConfigMap, records do not
		r.store(nil, set)
		r.fresh = true
		return nil
	case err != nil:
		return fmt.Errorf("reading ConfigMap \"%s/%s\": %w", r.namespace, ConfigMapName(r.driver), err)
	case r.taken && cm.Annotations[AnnotationHolder] != r.holder:
		r.endTerm(errNotHolder)
		return errNotHolder
	}
	if !byCheck && (r.cm == nil || r.cm.ResourceVersion != cm.ResourceVersion) {
		r.enqueueCheck()
	}
	r.store(cm, recordSetOf(cm))
	r.fresh = true
	return nil
}

// write stores next. If the response is lost, the next call reads the ConfigMap first.
func (r *records) write(ctx context.Context, next recordSet) (err error) {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: ConfigMapName(r.driver)}}
	if len(validation.IsValidLabelValue(r.driver)) == 0 {
		cm.Labels = map[string]string{LabelDriver: r.driver}
	}
	if r.cm != nil {
		cm = r.cm.DeepCopy()
	}
	cm.Annotations, cm.Data = next.annotations, map[string]string{}
	cm.Annotations[AnnotationHolder], cm.Annotations[AnnotationMode] = r.holder, string(r.mode)
	for value, n := range next.lost {
		text, err := json.Marshal(n)
		if err != nil {
			return fmt.Errorf("encoding the record of host %q: %w", value, err)
		}
		cm.Data[value] = string(text)
		if n.Unparsable && r.cm != nil {
			cm.Data[value] = r.cm.Data[value] // for the person who corrects it
		}
	}
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	r.fresh = false
	if client := r.client.CoreV1().ConfigMaps(r.namespace); r.cm == nil {
		cm, err = client.Create(ctx, cm, metav1.CreateOptions{})
	} else {
		cm, err = client.Update(ctx, cm, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("writing the records of lost nodes to ConfigMap \"%s/%s\": %w", r.namespace, ConfigMapName(r.driver), err)
	}
	r.store(cm, recordSetOf(cm))
	r.fresh, r.taken = true, true
	return nil
}
