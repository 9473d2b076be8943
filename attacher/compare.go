package attacher

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
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

func (m *marks) set(attachment types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.forced == nil {
		m.forced = map[types.UID]struct{}{}
	}
	m.forced[attachment] = struct{}{}
}

func (m *marks) drop(attachment types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.forced, attachment)
}

func (m *marks) noteChange(attachment types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.changed != nil {
		m.changed[attachment] = struct{}{}
	}
}

// begin has changes noted from now on; the returned function ends that and tells of them.
func (m *marks) begin() (end func() map[types.UID]struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.changed = map[types.UID]struct{}{}
	return func() map[types.UID]struct{} {
		m.mu.Lock()
		defer m.mu.Unlock()
		changed := m.changed
		m.changed = nil
		return changed
	}
}

// report is the IDs of the nodes to which a volume is published, by its handle. A
// volume of which the driver does not say that has a nil value that is there.
type report map[string][]string

// published tells whether a volume is published to a node; known is false when the
// driver did not say. A volume that is not in the report is nowhere.
func (r report) published(handle, nodeID string) (published, known bool) {
	nodes, listed := r[handle]
	if listed && nodes == nil {
		return false, false
	}
	return slices.Contains(nodes, nodeID), true
}

// compareForever compares at once, and then in intervals that differ a little, so that
// the controllers of many drivers do not all ask at the same time.
func (t *term) compareForever(ctx context.Context) {
	log := klog.FromContext(ctx)
	for {
		if t.c.deps.Ready(ctx) != nil {
			return
		}
		if err := t.compare(ctx); err != nil && ctx.Err() == nil {
			t.c.metrics.comparisons.WithLabelValues("error").Inc()
			log.Error(err, "The attachments were not compared with the driver; the next comparison starts afresh", "in", t.c.cfg.ReconcileSync)
		} else {
			t.c.metrics.comparisons.WithLabelValues("ok").Inc()
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(t.c.cfg.ReconcileSync + rand.N(t.c.cfg.ReconcileSync/10+1)):
		}
	}
}

// compare asks the driver where its volumes are published, and has those attachments
// looked at of which the status says something else. It writes nothing itself. The driver
// is asked first and the attachments are read afterwards: what has changed in between is
// left for the next time.
func (t *term) compare(ctx context.Context) error {
	end := t.marks.begin()
	reported, err := t.list(ctx)
	changed := end()
	if err != nil {
		return err
	}
	log := klog.FromContext(ctx)
	for _, va := range t.c.attachments.List() {
		if va.Spec.Attacher != t.c.driver.name {
			continue
		}
		if _, ok := changed[va.UID]; ok || t.vaQueue.Busy(keyOf(va)) {
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
		case !known:
		case published == s.attachment.Status.Attached:
			t.marks.drop(va.UID)
		default:
			t.c.metrics.mismatch(published)
			log.Info("The driver reports something else than the status", "volumeAttachment", va.Name, "attached", s.attachment.Status.Attached, "published", published)
			t.marks.set(va.UID)
			t.vaQueue.Add(keyOf(va))
		}
	}
	return nil
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
	return published, known, nil
}

// list reads the whole report of the driver, page by page, each with its own deadline.
func (t *term) list(ctx context.Context) (report, error) {
	reported, token := report{}, ""
	for {
		call, cancel := context.WithTimeout(ctx, t.c.cfg.Timeout)
		page, err := t.c.deps.CSI.ListVolumes(call, &csi.ListVolumesRequest{MaxEntries: int32(t.c.cfg.MaxEntries), StartingToken: token})
		cancel()
		if err != nil {
			return nil, fmt.Errorf("listing the volumes of the driver from token %q: %w", token, err)
		}
		for _, entry := range page.GetEntries() {
			switch {
			case entry.GetVolume() == nil:
			case entry.GetStatus() == nil:
				reported[entry.GetVolume().GetVolumeId()] = nil
			default:
				reported[entry.GetVolume().GetVolumeId()] = append([]string{}, entry.GetStatus().GetPublishedNodeIds()...)
			}
		}
		next := page.GetNextToken()
		if next == "" {
			return reported, nil
		}
		if next == token {
			return nil, fmt.Errorf("listing the volumes of the driver: the page of token %q names itself as the next one", token)
		}
		token = next
	}
}
