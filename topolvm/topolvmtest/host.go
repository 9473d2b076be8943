// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvmtest

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/topolvm"
)

// Extent is the unit of sizes in bytes.
const Extent = 4 << 20

// gRPC codes that topolvm-node writes to the status.
const (
	codeUnimplemented = 12
	codeInternal      = 13
	codeExhausted     = 8
)

// Class is a device class of a node. The first class of a node is its default class.
type Class struct {
	Name string
	Thin bool
	Size int64 // bytes
}

// Classes returns a thick class ssd and a thin class thin of 100 GiB each.
func Classes() []Class {
	return []Class{{Name: "ssd", Size: 100 << 30}, {Name: "thin", Thin: true, Size: 100 << 30}}
}

// LVMVolume is an LVM volume.
type LVMVolume struct {
	Name  string // of its LogicalVolume
	Class string
	Size  int64 // bytes
	// ReadOnly: it is a snapshot.
	ReadOnly bool
}

// Host is the LVM state of a node with the rules of topolvm-node, which have no clock. Its methods are safe for concurrent use.
type Host struct {
	driver  string
	lvs     *topolvm.Client
	classes []Class

	mu      sync.Mutex
	volumes map[types.UID]LVMVolume
	sizes   map[string]int64 // of classes
}

// NewHost returns a host without LVM volumes, which writes to LogicalVolumes with lvs.
func NewHost(driver string, lvs *topolvm.Client, classes []Class) *Host {
	h := &Host{driver: driver, lvs: lvs, classes: classes, volumes: map[types.UID]LVMVolume{}, sizes: map[string]int64{}}
	for _, c := range classes {
		h.sizes[c.Name] = c.Size
	}
	return h
}

// Task is what topolvm-node does for a LogicalVolume. Each is a change of LVM, a write to the LogicalVolume, or both in this order.
type Task string

// The tasks of topolvm-node.
const (
	Nothing      Task = ""
	Retry        Task = "waits for the source of" // which does not exist, or is larger. topolvm-node does not report that
	AddFinalizer Task = "adds the finalizer to"
	AddLabel     Task = "adds the label to"
	Create       Task = "creates"
	Report       Task = "reports the ID of" // of an LVM volume whose status update got lost
	Expand       Task = "expands"           // also writes a size that is missing
	Remove       Task = "removes"
)

// Fault is what goes wrong with a task. The zero value is nothing.
type Fault struct {
	Code  int64 // of gRPC, with which [Create] or [Expand] fails
	Exits bool  // topolvm-node exits after the change of LVM
}

// Next returns the next task for lv, whose source is nil if it does not exist.
func (h *Host) Next(lv, source *topolvm.LogicalVolume) Task {
	held, ignored := slices.Contains(lv.Finalizers, h.finalizer()), lv.Annotations[h.driver+"/pendingdeletion"] != ""
	h.mu.Lock()
	defer h.mu.Unlock()
	_, exists := h.volumes[lv.UID]
	switch {
	case ignored, lv.DeletionTimestamp != nil && !held:
		return Nothing
	case lv.DeletionTimestamp != nil:
		return Remove
	case !held:
		return AddFinalizer
	case lv.Labels[createdBy] == "":
		return AddLabel
	case lv.Status.VolumeID == "" && exists:
		return Report
	case lv.Status.VolumeID == "" && lv.Status.Code != 0: // no second attempt
		return Nothing
	case lv.Status.VolumeID == "" && lv.Spec.Source != "" && h.fails(lv) == nil &&
		(source == nil || source.Status.CurrentSize > lv.Spec.Size):
		return Retry
	case lv.Status.VolumeID == "":
		return Create
	case lv.Spec.Size > lv.Status.CurrentSize:
		return Expand
	}
	return Nothing
}

const createdBy = "app.kubernetes.io/created-by"

func (h *Host) finalizer() string { return h.driver + "/logicalvolume" }

// Do does a task for lv. It reports whether the task failed, as the status then says. The error is that of a write, mostly a conflict.
func (h *Host) Do(ctx context.Context, task Task, lv *topolvm.LogicalVolume, fault Fault) (failed bool, err error) {
	switch task {
	case AddFinalizer:
		return false, h.patch(ctx, lv, map[string]any{"finalizers": append(slices.Clone(lv.Finalizers), h.finalizer())})
	case AddLabel:
		return false, h.patch(ctx, lv, map[string]any{"labels": map[string]string{createdBy: "topolvm-controller"}})
	case Remove:
		h.mu.Lock()
		delete(h.volumes, lv.UID)
		h.mu.Unlock()
		if fault.Exits {
			return false, nil
		}
		others := slices.DeleteFunc(slices.Clone(lv.Finalizers), func(f string) bool { return f == h.finalizer() })
		err = h.patch(ctx, lv, map[string]any{"finalizers": others})
		if apierrors.IsNotFound(err) {
			err = nil
		}
		return false, err
	case Nothing, Retry:
		return false, nil
	}
	next := lv.DeepCopyObject().(*topolvm.LogicalVolume)
	failure := h.change(task, next, fault)
	switch {
	case fault.Exits && failure == nil:
		return false, nil
	case failure != nil:
		next.Status.Code, next.Status.Message = failure.Code, failure.Message
	case task == Report: // the size follows, as in topolvm-node
		next.Status = topolvm.Status{VolumeID: string(lv.UID)}
	default:
		next.Status = topolvm.Status{VolumeID: string(lv.UID), CurrentSize: topolvm.Bytes(h.Volumes()[lv.UID].Size)}
	}
	_, err = h.lvs.UpdateStatus(ctx, next, metav1.UpdateOptions{})
	return failure != nil, err
}

// change changes the LVM volume of lv, or returns the failure that topolvm-node reports.
func (h *Host) change(task Task, lv *topolvm.LogicalVolume, fault Fault) *topolvm.Status {
	if task == Report {
		return nil
	}
	if fault.Code != 0 {
		return &topolvm.Status{Code: fault.Code, Message: "as told"}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if failure := h.fails(lv); task == Create && failure != nil {
		return failure
	}
	had, exists := h.volumes[lv.UID]
	if !exists {
		had = LVMVolume{Name: lv.Name, Class: h.class(lv), ReadOnly: lv.Spec.AccessType == "ro"}
	}
	size := (int64(lv.Spec.Size) + Extent - 1) / Extent * Extent
	if h.free(had.Class) < size-had.Size {
		return &topolvm.Status{Code: codeExhausted, Message: "no enough space left on VG"}
	}
	had.Size = size
	h.volumes[lv.UID] = had
	return nil
}

// class returns the name of the device class of lv.
func (h *Host) class(lv *topolvm.LogicalVolume) string {
	if lv.Spec.DeviceClass == "" && len(h.classes) > 0 {
		return h.classes[0].Name
	}
	return lv.Spec.DeviceClass
}

// fails returns why the LVM volume of lv can never be created, or nil.
func (h *Host) fails(lv *topolvm.LogicalVolume) *topolvm.Status {
	i := slices.IndexFunc(h.classes, func(c Class) bool { return c.Name == h.class(lv) })
	switch {
	case i < 0:
		return &topolvm.Status{Code: codeInternal, Message: "failed to check volume existence"}
	case lv.Spec.Source != "" && !h.classes[i].Thin:
		return &topolvm.Status{Code: codeUnimplemented, Message: "Thick snapshots are not implemented yet"}
	}
	return nil
}

// patch patches the metadata of lv.
func (h *Host) patch(ctx context.Context, lv *topolvm.LogicalVolume, metadata map[string]any) error {
	metadata["uid"] = lv.UID
	data, err := json.Marshal(map[string]any{"metadata": metadata})
	if err == nil {
		_, err = h.lvs.Patch(ctx, lv.Name, types.MergePatchType, data, metav1.PatchOptions{})
	}
	return err
}

// Volumes returns the LVM volumes by the UIDs of their LogicalVolumes.
func (h *Host) Volumes() map[types.UID]LVMVolume {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := map[types.UID]LVMVolume{}
	for uid, v := range h.volumes {
		all[uid] = v
	}
	return all
}

// Resize sets the size of a device class in bytes.
func (h *Host) Resize(class string, size int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.sizes[class] = size
}

// free returns the free bytes of a class. It must be called with the lock held.
func (h *Host) free(class string) int64 {
	free := h.sizes[class]
	for _, v := range h.volumes {
		if v.Class == class {
			free -= v.Size
		}
	}
	return max(0, free)
}

// Capacities returns the capacity annotations of the Node.
func (h *Host) Capacities() map[string]string {
	h.mu.Lock()
	defer h.mu.Unlock()
	values := map[string]string{}
	for i, c := range h.classes {
		free := strconv.FormatInt(h.free(c.Name), 10)
		values["capacity."+h.driver+"/"+c.Name] = free
		if i == 0 {
			values["capacity."+h.driver+"/00default"] = free
		}
	}
	return values
}
