// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecleanup

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	expiring "k8s.io/apimachinery/pkg/util/cache"
)

// The reasons of events. docs/reference.md has their comments.
const (
	// Warning, PV, PVC: the node of the volume does not exist; the message has the planned action and its time
	reasonMissing = "NodeMissing"
	// Normal, PV, PVC: the node exists again; nothing is cleaned up
	reasonReturned = "NodeReturned"
	// Warning, PV, PVC, Node, CSIDriver: nothing is cleaned up, and why: an opt-out, the scope, the mode, a pod that uses the
	// PVC, an approval without effect, an unknown topology key
	reasonSkipped = "NodeCleanupSkipped"
	// Warning, PV, or PVC without a PV: the PVC was deleted because its node was deleted
	reasonClaimDeleted = "NodeVolumeClaimDeleted"
	// Warning, PV, Namespace of its PVC: the PV is about to be removed without its driver, or, on the Namespace, was; scrub
	// the disks of that node before they are used again
	reasonForceRemoved = "NodeVolumeForceRemoved"
	// Warning, PV, PVC, Node, CSIDriver: a permission is missing, an admission webhook or a policy refuses a request, a
	// VolumeAttachment or another controller's finalizer keeps the volume, the PV is in phase Failed, a node with the driver lacks
	// the topology label, the opt-out of a Node that is being deleted cannot be recorded, the finalizer keeps a Node with
	// --node-finalizer-mode=off, or a record cannot be parsed
	reasonBlocked = "NodeCleanupBlocked"
	// Warning, CSIDriver: too many nodes are lost; nothing more is cleaned up until an administrator approves it
	reasonBreakerOpen = "NodeCleanupBreakerOpen"
	// Normal, CSIDriver: no cleanup waits for an approval any more
	reasonBreakerClosed = "NodeCleanupBreakerClosed"
	// Warning, Node: its deletion was held for --node-finalizer-timeout; the cleanup continues without the finalizer
	reasonTimeout = "NodeFinalizerTimeout"
)

// object is an object that an event can be about.
type object interface {
	runtime.Object
	metav1.Object
}

// repeatAfter is the time in which an event that reports no change is not repeated.
const repeatAfter = 10 * time.Minute

// notifier sends events.
type notifier struct {
	send func(obj runtime.Object, kind, reason, message string)
	sent *expiring.Expiring // by object, reason and cause
}

func newNotifier(send func(obj runtime.Object, kind, reason, message string)) *notifier {
	return &notifier{send: send, sent: expiring.NewExpiring()}
}

func (n *notifier) warn(obj object, reason, format string, args ...any) {
	n.send(obj, corev1.EventTypeWarning, reason, fmt.Sprintf(format, args...))
}

// volume sends an event about a volume and its claim.
func (n *notifier) volume(v volume, kind, reason, format string, args ...any) {
	message := fmt.Sprintf(format, args...)
	n.send(v.pv, kind, reason, message)
	if v.claim != nil {
		n.send(v.claim, kind, reason, message)
	}
}

// seldom sends a warning unless one about obj with this reason and cause was sent lately.
func (n *notifier) seldom(obj object, reason, cause, message string) {
	key := strings.Join([]string{string(obj.GetUID()), obj.GetName(), reason, cause}, "/")
	if _, repeated := n.sent.Get(key); !repeated {
		n.sent.Set(key, nil, repeatAfter)
		n.warn(obj, reason, "%s", message)
	}
}

// step reports a step that keeps a volume.
func (n *notifier) step(v volume, st step) {
	switch st.action {
	case doSkip:
		n.skipped(v, st.reason, st.reason+": "+st.message)
	case doReport:
		n.seldom(v.pv, reasonBlocked, st.reason, st.message)
	}
}

// refused reports err, a refusal by the API server of a request for what, in an event about obj.
func (n *notifier) refused(obj object, what string, err error) {
	message := err.Error()
	if strings.Contains(message, `is forbidden: User "`) { // the response of an authorizer, not of admission
		message += grantHint
	}
	n.seldom(obj, reasonBlocked, string(apierrors.ReasonForError(err))+"/"+what, message)
}

// skipped reports why nothing of a volume is deleted.
func (n *notifier) skipped(v volume, cause, message string) {
	n.seldom(v.pv, reasonSkipped, cause, "Nothing is cleaned up: "+message)
	if v.claim != nil {
		n.seldom(v.claim, reasonSkipped, cause, "Nothing is cleaned up: "+message)
	}
}

// missing reports that the node of a volume is missing, and what follows.
func (n *notifier) missing(p Policy, h host, v volume, due time.Time) {
	st, deadline := p.nextStep(v, time.Now()), due.UTC().Format(time.RFC3339)
	follows := "nothing is deleted after the grace period (" + deadline + ")"
	switch {
	case !p.Deletes():
		follows = "nothing is deleted. For a cleanup, set --node-cleanup=claims or volumes"
	case h.record.OptedOut:
		follows += ": the Node had opted out"
	case len(v.kept()) > 0:
		follows = "nothing is deleted while node " + strings.Join(v.kept(), ", ") + ", which can also use the volume, exists"
	case st.pending && st.action == doDeleteClaim && p.NodeCleanup == ModeVolumes && p.removes(v.pv):
		follows = "the claim will be deleted, and the volume removed, not before " + deadline
	case st.action == doDeleteClaim:
		follows = "the claim will be deleted, not before " + deadline
	case st.pending:
		follows = "the volume will be removed, not before " + deadline
	default:
		follows += ": " + cmp.Or(st.message, st.reason)
	}
	n.volume(v, corev1.EventTypeWarning, reasonMissing, "Node %s of this volume is missing. Mode %s: %s", h.name(), p.NodeCleanup, follows)
}

// grantHint completes the message of a missing permission.
const grantHint = ". Grant the missing permission to the ServiceAccount; storage-controller doctor --print-rbac prints the missing rules"

// csiDriver returns the CSIDriver, the object of events about no single volume or node.
func (l live) csiDriver(ctx context.Context, name string) *storagev1.CSIDriver {
	d, err := l.driver(ctx, name)
	if err != nil || d == nil { // it need not exist
		d = &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	return d
}
