// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// LostNode is the record of a host whose Node was deleted, or is being deleted.
type LostNode struct {
	Value string    `json:"-"`              // of the topology key; the key of the record
	Node  string    `json:"node,omitempty"` // name of the Node; empty if no process has seen it
	UID   types.UID `json:"uid,omitempty"`  // of the Node
	Since time.Time `json:"since,omitzero"` // the API server confirmed that no Node exists; zero: one may exist
	// Planned means that the Node was drained: a check of it, while it was being deleted, found it unschedulable and no running
	// pod that uses its volumes.
	Planned  bool      `json:"planned,omitempty"`
	Held     string    `json:"held,omitempty"`    // [HeldByBreaker]: until an approval or the return of the Node
	Approved time.Time `json:"approved,omitzero"` // an administrator approved the clean-up after this loss
	// ApprovedAll means that the approval includes volumes whose owners did not opt in.
	ApprovedAll bool      `json:"approvedAll,omitempty"`
	OptedOut    bool      `json:"optedOut,omitempty"` // the Node had opted out
	Acted       time.Time `json:"acted,omitzero"`     // last deletion, for the window of the breaker
	Unparsable  bool      `json:"-"`                  // the stored record cannot be parsed
}

// HeldByBreaker is the value of [LostNode.Held].
const HeldByBreaker = "breaker"

// errNotHolder ends a term whose records have another holder: another process leads, or an administrator has
// changed [AnnotationHolder]. The next term, which begins with the Lease, takes the records over.
var errNotHolder = fmt.Errorf("%w: annotation %s of the records of lost nodes has changed", election.ErrLost, AnnotationHolder)

// recordSet is the content of the ConfigMap.
type recordSet struct {
	lost        map[string]LostNode
	annotations map[string]string
}

func (s recordSet) clone() recordSet { return recordSet{maps.Clone(s.lost), maps.Clone(s.annotations)} }

func recordSetOf(cm *corev1.ConfigMap) recordSet {
	s := recordSet{map[string]LostNode{}, map[string]string{}}
	maps.Copy(s.annotations, cm.Annotations)
	for _, n := range ParseLostNodes(cm) {
		s.lost[n.Value] = n
	}
	return s
}

// approve moves approvals into the records, and returns why others have no effect. None stays in the annotation: an approval
// is for one loss, so the host must be lost already. deletes is [Settings.Deletes].
func (s recordSet) approve(now time.Time, deletes bool) (problems []string) {
	text, until := s.annotations[AnnotationApprove], s.annotations[annotationApproveUntil]
	delete(s.annotations, AnnotationApprove)
	delete(s.annotations, annotationApproveUntil)
	for name := range strings.SplitSeq(text, ",") {
		name, all := strings.CutSuffix(strings.TrimSpace(name), approveAll)
		problem := ""
		switch {
		case name == "":
			continue
		case name == "*" || until != "":
			problem = "the value * and " + annotationApproveUntil + " were removed. Name the nodes"
		case !deletes:
			problem = "the mode of the cleanup deletes nothing. Set --node-cleanup=claims or volumes"
		case s.lost[name].Unparsable:
			problem = "its record cannot be parsed"
		case !s.approveNamed(name, all, now):
			problem = "no such node is lost"
		default:
			continue
		}
		problems = append(problems, fmt.Sprintf("%s: %s has no effect: %s", AnnotationApprove, name, problem))
	}
	return problems
}

// approveNamed approves the records of a host or Node, with all also for volumes whose owners did not opt in. It reports whether
// there are any.
func (s recordSet) approveNamed(name string, all bool, now time.Time) (found bool) {
	for value, r := range s.lost {
		if name != value && name != r.Node || r.Unparsable || r.returned() {
			continue
		}
		found = true
		if r.Approved.IsZero() || r.Held != "" {
			r.Approved, r.Held = now.UTC().Truncate(time.Second), ""
		}
		r.ApprovedAll = r.ApprovedAll || all
		s.lost[value] = r
	}
	return found
}

// records holds the records of a term, as the API server last stored them.
type records struct {
	client            kubernetes.Interface
	namespace, driver string
	mode              Mode
	holder            string // of this term
	timeout           time.Duration
	endTerm           func(cause error)
	enqueueCheck      func() // called when a read, except that of the check of the lost nodes, finds another version

	requestLock chan struct{} // has an element while a request is under way
	taken       bool          // this term is the holder; guarded by requestLock
	fresh       bool          // set is what the API server stores; guarded by requestLock

	mu  sync.Mutex        // guards the fields below, which only the holder of requestLock replaces. Never held during a request
	cm  *corev1.ConfigMap // nil: does not exist
	set recordSet         // not modified
}

func newRecords(
	deps Deps, mode Mode, holder string, timeout time.Duration, endTerm func(cause error), enqueueCheck func(),
) *records {
	return &records{client: deps.Client, namespace: deps.Namespace, driver: deps.Driver, mode: mode, holder: holder, timeout: timeout,
		endTerm: endTerm, enqueueCheck: enqueueCheck, requestLock: make(chan struct{}, 1), set: recordSetOf(&corev1.ConfigMap{})}
}

// take waits until no other request is under way. On success, the caller must call done.
func (r *records) take(ctx context.Context) error {
	select {
	case r.requestLock <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (r *records) done() { <-r.requestLock }

// store replaces the records.
func (r *records) store(cm *corev1.ConfigMap, set recordSet) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cm, r.set = cm, set
}

// get returns the record of a host.
func (r *records) get(value string) (LostNode, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, ok := r.set.lost[value]
	return n, ok
}

// all returns the records, sorted by value, and the annotations of the ConfigMap.
func (r *records) all() ([]LostNode, map[string]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	nodes := slices.Collect(maps.Values(r.set.lost))
	slices.SortFunc(nodes, func(a, b LostNode) int { return strings.Compare(a.Value, b.Value) })
	return nodes, maps.Clone(r.set.annotations)
}

// lastCheck returns the time of the last check of the lost nodes, as far as it is recorded.
func (r *records) lastCheck() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	last, _ := time.Parse(time.RFC3339, r.set.annotations[AnnotationLastLook])
	return last
}

// load reads the ConfigMap, so that changes by people take effect. The first call of a term takes
// over the records; it creates the ConfigMap if create is set. byCheck: the check of the lost nodes calls it.
func (r *records) load(ctx context.Context, create, byCheck bool) error {
	if err := r.take(ctx); err != nil {
		return err
	}
	defer r.done()
	if err := r.read(ctx, byCheck); err != nil {
		return err
	}
	lost := r.cm == nil && r.taken && len(r.set.lost) > 0 // the ConfigMap was deleted: rule 5
	if lost || !r.taken && (create || r.cm != nil) {
		return r.write(ctx, r.set.clone())
	}
	r.taken = true
	return nil
}

// confirm returns an error unless this term still holds the records. Call it before each deletion.
func (r *records) confirm(ctx context.Context) error { return r.load(ctx, true, false) }

// change applies edit to the records and writes them. edit may be called again after a conflict with
// a change by people.
func (r *records) change(ctx context.Context, edit func(recordSet)) error {
	if err := r.take(ctx); err != nil {
		return err
	}
	defer r.done()
	const attempts = 3
	for i := 1; ; i++ {
		if !r.fresh {
			if err := r.read(ctx, false); err != nil {
				return err
			}
		}
		next := r.set.clone()
		edit(next)
		if maps.Equal(next.lost, r.set.lost) && maps.Equal(next.annotations, r.set.annotations) {
			return nil
		}
		err := r.write(ctx, next)
		if i == attempts || !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) && !kube.IsNotFound(err) {
			return err
		}
	}
}
