package nodecontroller

import (
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/record"
)

// The reasons of events.
const (
	reasonMissing       = "NodeMissing"
	reasonReturned      = "NodeReturned"
	reasonIdentity      = "VolumeNodeIdentityChanged"
	reasonSkipped       = "NodeCleanupSkipped"
	reasonClaimDeleted  = "NodeVolumeClaimDeleted"
	reasonForceRemoved  = "NodeVolumeForceRemoved"
	reasonBlocked       = "NodeCleanupBlocked"
	reasonBreakerOpen   = "NodeCleanupBreakerOpen"
	reasonBreakerClosed = "NodeCleanupBreakerClosed"
	reasonTimeout       = "NodeFinalizerTimeout"
)

// event is one event on an object.
type event struct {
	kind, reason, message string
}

func warning(reason, format string, args ...any) event {
	return event{corev1.EventTypeWarning, reason, fmt.Sprintf(format, args...)}
}

func normal(reason, format string, args ...any) event {
	return event{corev1.EventTypeNormal, reason, fmt.Sprintf(format, args...)}
}

// missingEvent tells what will become of a volume whose node is missing, once the grace is over.
func missingEvent(s snapshot, p policy, due time.Time) event {
	missing, goal := fmt.Sprintf("Node %s, which has this volume, is missing", list(s.nodes)), p.goal(s)
	deadline, why := due.UTC().Format(time.RFC3339), ""
	switch {
	case !p.writes():
	case !p.orphanPath:
		why = "; --node-cleanup-paths leaves out " + PathOrphan
	case !goal.due():
		why = "; " + goal.String()
	default:
		fate := "the volume will be removed"
		if goal.action == doDeleteClaim {
			fate = "the claim will be deleted"
			if p.mode == CleanupVolumes && p.removes(s.volume) {
				fate += ", and the volume removed"
			}
		}
		return warning(reasonMissing, "%s; in mode %s %s, not before %s", missing, p.mode, fate, deadline)
	}
	return warning(reasonMissing, "%s; in mode %s nothing is done about it when its grace ends at %s%s", missing, p.mode, deadline, why)
}

func breakerEvent(v verdict) event {
	return warning(reasonBreakerOpen, "%d of %d nodes are lost, and at most %d may be: nothing more is cleaned up until an administrator approves it. Lost: %s",
		v.lost, v.total, v.limit, list(v.names))
}

// list is at most ten of names, and how many more there are.
func list(names []string) string {
	const most = 10
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// repeatAfter is the time in which an event that says that nothing happened is not
// sent again about an object.
const repeatAfter = 10 * time.Minute

// notifier sends events, in one place.
type notifier struct {
	recorder record.EventRecorder
	prefix   string

	mu    sync.Mutex
	sent  map[string]time.Time // by UID, reason and cause
	swept time.Time
}

func newNotifier(recorder record.EventRecorder, dryRun bool) *notifier {
	n := &notifier{recorder: recorder, sent: map[string]time.Time{}}
	if dryRun {
		n.prefix = "(dry-run) "
	}
	return n
}

// object is anything that an event can be about.
type object interface {
	runtime.Object
	metav1.Object
}

func (n *notifier) send(obj object, e event) {
	n.recorder.Event(obj, e.kind, e.reason, n.prefix+e.message)
}

// seldom sends e unless one about obj with the same reason, for the same cause, was sent
// within the last ten minutes.
func (n *notifier) seldom(obj object, cause string, e event) {
	now := time.Now()
	uid := string(obj.GetUID())
	if uid == "" { // it does not exist, or not any more
		uid = obj.GetName()
	}
	key := strings.Join([]string{uid, e.reason, cause}, "/")
	n.mu.Lock()
	last, ok := n.sent[key]
	if ok && now.Sub(last) < repeatAfter {
		n.mu.Unlock()
		return
	}
	n.sent[key] = now
	if now.Sub(n.swept) > repeatAfter { // so that it does not grow for ever
		n.swept = now
		maps.DeleteFunc(n.sent, func(_ string, at time.Time) bool { return now.Sub(at) > repeatAfter })
	}
	n.mu.Unlock()
	n.send(obj, e)
}
