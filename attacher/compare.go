package attacher

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// marks are the attachments of which the driver has reported something else than
// what their status says. A mark stays until a call has mended that, or until the two
// agree. The zero value has none.
type marks struct {
	mu     sync.Mutex
	forced map[types.UID]struct{}
	// changed is the attachments that have changed since a report was begun: what
	// the driver said of them is too old. Nil while there is no report.
	changed map[types.UID]struct{}
}

func (m *marks) has(attachment types.UID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.forced[attachment]
	return ok
}

// set marks an attachment, unless it has changed since the report was begun. The two
// are one step: whoever ends the reason for a mark notes a change first and drops the
// mark then, and so leaves none behind. News is what was not marked before.
func (m *marks) set(attachment types.UID) (marked, news bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, changed := m.changed[attachment]; changed {
		return false, false
	}
	if m.forced == nil {
		m.forced = map[types.UID]struct{}{}
	}
	_, before := m.forced[attachment]
	m.forced[attachment] = struct{}{}
	return true, !before
}

func (m *marks) drop(attachment types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.forced, attachment)
}

// noteChange is called when an attachment has changed, before an own write of it, and
// after a call for it, whatever that came to.
func (m *marks) noteChange(attachment types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.changed != nil {
		m.changed[attachment] = struct{}{}
	}
}

func (m *marks) hasChanged(attachment types.UID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.changed[attachment]
	return ok
}

// begin has changes noted from now on, until end.
func (m *marks) begin() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.changed = map[types.UID]struct{}{}
}

func (m *marks) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.changed = nil
}

// report is where volumes are published, by their handles. A volume that is published
// nowhere is not in it; one of which the driver does not say where it is has nil.
type report map[string]*csi.ListVolumesResponse_VolumeStatus

func (r report) add(entry *csi.ListVolumesResponse_Entry) {
	handle, status := entry.GetVolume().GetVolumeId(), entry.GetStatus()
	switch {
	case entry.GetVolume() == nil:
	case status != nil && len(status.GetPublishedNodeIds()) == 0:
		delete(r, handle) // of a volume that is listed twice the last entry counts
	default:
		r[handle] = status
	}
}

// published tells whether a volume is published to a node; known is false when the
// driver did not say.
func (r report) published(handle, nodeID string) (published, known bool) {
	status, listed := r[handle]
	if listed && status == nil {
		return false, false
	}
	return slices.Contains(status.GetPublishedNodeIds(), nodeID), true
}

// compareForever compares at once, and then in intervals that differ a little, so that
// the controllers of many drivers do not all ask at the same time.
func (t *term) compareForever(ctx context.Context) {
	log := klog.FromContext(ctx)
	for {
		if t.c.deps.Ready(ctx) != nil {
			return
		}
		switch err := t.compareOnce(ctx); {
		case err == nil:
			t.c.metrics.comparisons.WithLabelValues("ok").Inc()
		case ctx.Err() == nil:
			t.c.metrics.comparisons.WithLabelValues("error").Inc()
			log.Error(err, "The attachments were not compared with the driver; the next comparison starts afresh", "in", t.c.cfg.ReconcileSync)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(t.c.cfg.ReconcileSync + rand.N(t.c.cfg.ReconcileSync/10+1)):
		}
	}
}

// compareOnce turns a panic into an error: it costs one comparison, not the process.
func (t *term) compareOnce(ctx context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return t.compare(ctx)
}

// compare asks the driver where its volumes are published, and has those attachments
// looked at of which the status says something else. It writes nothing itself. The driver
// is asked first and the attachments are read afterwards: what has changed in between is
// left for the next time.
func (t *term) compare(ctx context.Context) error {
	t.marks.begin()
	defer t.marks.end()
	reported, err := t.list(ctx)
	if err != nil {
		return err
	}
	t.check(ctx, reported)
	return nil
}

// check marks the attachments of which reported says something else than their status.
func (t *term) check(ctx context.Context, reported report) {
	log := klog.FromContext(ctx)
	for _, va := range t.c.attachments.List() {
		if va.Spec.Attacher != t.c.driver.name || t.marks.hasChanged(va.UID) || t.vaQueue.Processing(keyOf(va)) {
			continue
		}
		s := t.gather(keyOf(va), nil, false)
		if s.attachment == nil {
			continue
		}
		published, known, err := t.c.driver.isPublished(s, reported)
		switch {
		case err != nil:
			log.V(2).Info("Not compared with the driver", "volumeAttachment", va.Name, "err", err)
			continue
		case !known:
			continue
		case published == s.attachment.Status.Attached && !inDoubt(s.attachment):
			t.marks.drop(va.UID)
			continue
		}
		marked, news := t.marks.set(va.UID)
		if marked && published != s.attachment.Status.Attached {
			t.c.metrics.mismatch(published)
			log.Info("The driver reports something else than the status", "volumeAttachment", va.Name, "attached", s.attachment.Status.Attached, "published", published)
		}
		switch {
		case news:
			t.vaQueue.Add(keyOf(va))
		case marked: // it is tried already, and each comparison must not cut its back-off short
			t.vaQueue.Resync(keyOf(va))
		}
	}
}

// inDoubt tells whether the last attempt to attach va once more has failed. It may have
// taken effect, with another metadata than the one in the status, which only a
// publish that succeeds tells; that one removes the error, too.
func inDoubt(va *storagev1.VolumeAttachment) bool {
	return va.DeletionTimestamp == nil && va.Status.Attached && va.Status.AttachError != nil
}

// isPublished tells what the driver reports of the volume of an attachment at its node.
func (d driver) isPublished(s snapshot, reported report) (published, known bool, err error) {
	src, err := d.resolve(s.attachment, s.volume)
	if s.attachment.DeletionTimestamp != nil { // a volume that is gone can still be detached, but not attached again
		src, err = d.detachSource(s)
	}
	if err != nil {
		return false, false, err
	}
	nodeID, err := d.nodeID(s, true)
	if err != nil {
		return false, false, err
	}
	handle, err := d.reportedHandle(src, nodeID)
	if err != nil {
		return false, false, err
	}
	published, known = reported.published(handle, nodeID)
	// A node that was made anew under its name has another ID; the volume may still be at the old one.
	if noted := s.attachment.Annotations[annNodeID]; known && !published && noted != "" {
		published, known = reported.published(handle, noted)
	}
	return published, known, nil
}

// list reads the whole report of the driver, page by page, each with its own deadline.
func (t *term) list(ctx context.Context) (report, error) {
	reported, token, seen := report{}, "", map[string]struct{}{}
	for {
		call, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
		page, err := t.c.deps.CSI.ListVolumes(call, &csi.ListVolumesRequest{MaxEntries: int32(t.c.cfg.MaxEntries), StartingToken: token})
		cancel()
		if err != nil {
			return nil, fmt.Errorf("listing the volumes of the driver from token %q: %w", token, err)
		}
		for _, entry := range page.GetEntries() {
			reported.add(entry)
		}
		if token = page.GetNextToken(); token == "" {
			return reported, nil
		}
		if _, ok := seen[token]; ok { // it would go round in circles for ever
			return nil, fmt.Errorf("listing the volumes of the driver: token %q comes twice", token)
		}
		seen[token] = struct{}{}
	}
}
