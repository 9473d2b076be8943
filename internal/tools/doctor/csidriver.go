// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// checkCSIDriver compares the CSIDriver object with the capabilities of the driver.
func (e *examination) checkCSIDriver(ctx context.Context) {
	const name = "csidriver"
	query := apiread.Query{Topic: name, What: apiread.Name("CSIDriver", "", e.driver.Name), Effect: onlyThisCommand}
	read := apiread.Get(ctx, e.reader, query, e.driver.Name, e.Kubernetes.StorageV1().CSIDrivers().Get)
	obj := read.Value
	switch {
	case read.Missing:
		e.add(name, finding.Warning, "create it; it belongs to the manifests of the driver",
			"no CSIDriver object %s: defaults apply (attachRequired=true, storageCapacity=false, podInfoOnMount=false)", e.driver.Name)
		obj = &storagev1.CSIDriver{}
	case !read.Found:
		return
	default:
		policy := ptr.Deref(obj.Spec.FSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy)
		e.ok(name, "%s, podInfoOnMount=%t, fsGroupPolicy=%s", obj.Name, ptr.Deref(obj.Spec.PodInfoOnMount, false), policy)
	}
	if !e.known {
		e.unknown("csidriver attachRequired", "the capabilities of the driver are unknown")
		return
	}
	e.Findings = append(e.Findings, attachRequired(obj, e.driver, e.plan), storageCapacity(obj, e.driver, e.plan),
		lifecycleModes(obj, e.driver))
}

// attachRequired compares CSIDriver.spec.attachRequired with PUBLISH_UNPUBLISH_VOLUME.
func attachRequired(obj *storagev1.CSIDriver, driver csiclient.Driver, plan Plan) finding.Finding {
	required, publishes := ptr.Deref(obj.Spec.AttachRequired, true), driver.Controller.PublishUnpublishVolume
	c := finding.Finding{Topic: "csidriver attachRequired", Severity: finding.OK}
	switch {
	case required == publishes:
		c.Message = fmt.Sprintf("%t, as PUBLISH_UNPUBLISH_VOLUME", required)
	case publishes:
		c.Severity = finding.Failing
		c.Message = "false, but the driver reports PUBLISH_UNPUBLISH_VOLUME: volumes are mounted without ControllerPublishVolume"
		c.Next = "recreate the CSIDriver with attachRequired: true (the field is immutable)"
	case plan.runs("attacher"):
		c.Severity = finding.Warning
		c.Message = "true, but the driver does not report PUBLISH_UNPUBLISH_VOLUME: " +
			"every pod waits until its VolumeAttachment is marked as attached"
		c.Next = "set attachRequired: false and do not run the attacher"
	default:
		c.Severity = finding.Failing
		c.Message = "true, but the driver does not report PUBLISH_UNPUBLISH_VOLUME and the attacher does not run: " +
			"pods wait for their VolumeAttachments indefinitely"
		c.Next = "set attachRequired: false, or run the attacher (--controllers with attacher)"
		if plan.Selected {
			c.Severity, c.Message = finding.Warning, strings.Replace(c.Message, "does not run", "is not in --controllers", 1)
		}
	}
	return c
}

// storageCapacity compares CSIDriver.spec.storageCapacity with GET_CAPACITY and the role capacity.
func storageCapacity(obj *storagev1.CSIDriver, driver csiclient.Driver, plan Plan) finding.Finding {
	used := ptr.Deref(obj.Spec.StorageCapacity, false)
	c := finding.Finding{Topic: "csidriver storageCapacity", Severity: finding.OK, Message: fmt.Sprint(used)}
	const consequence = "the scheduler finds no node for pods with WaitForFirstConsumer volumes"
	switch {
	case used && !driver.Controller.GetCapacity:
		c.Severity, c.Message = finding.Failing,
			"true, but the driver does not report GET_CAPACITY: no capacity is published, and "+consequence
		c.Next = "set storageCapacity: false"
	case used && !plan.Capacity:
		c.Severity, c.Message = finding.Failing, "true, but the role capacity does not run: "+consequence
		c.Next = "run the role, or set storageCapacity: false"
		if plan.Selected {
			c.Severity = finding.Warning
		}
	case !used && plan.Capacity:
		c.Severity, c.Message = finding.Warning, "false, but capacity is published: the scheduler ignores it"
		c.Next = "set storageCapacity: true after the first CSIStorageCapacity objects were created"
	}
	return c
}

// lifecycleModes checks that CSIDriver.spec.volumeLifecycleModes allows provisioned volumes.
func lifecycleModes(obj *storagev1.CSIDriver, driver csiclient.Driver) finding.Finding {
	modes := obj.Spec.VolumeLifecycleModes
	if len(modes) == 0 {
		modes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
	}
	var have []string
	for _, m := range modes {
		have = append(have, string(m))
	}
	c := finding.Finding{Topic: "csidriver volumeLifecycleModes", Severity: finding.OK, Message: strings.Join(have, ", ")}
	if !slices.Contains(modes, storagev1.VolumeLifecyclePersistent) && driver.Controller.CreateDeleteVolume {
		c.Severity = finding.Failing
		c.Message += " without Persistent, but the driver reports CREATE_DELETE_VOLUME: the kubelet refuses its PersistentVolumes"
		c.Next = "recreate the CSIDriver with Persistent in volumeLifecycleModes"
	}
	return c
}
