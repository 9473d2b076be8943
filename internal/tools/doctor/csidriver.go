package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// checkCSIDriver compares the CSIDriver with what the driver says of itself.
func (e *examination) checkCSIDriver(ctx context.Context) {
	name := "csidriver"
	if e.driver.Name == "" {
		e.skip(name, "the name of the driver is not known")
		return
	}
	obj, err := e.client.StorageV1().CSIDrivers().Get(ctx, e.driver.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		e.add(name, Warning, "create it: it belongs to the manifests of the driver", "there is no CSIDriver %s: Kubernetes takes every volume as one to attach, capacity as unknown, and pods are not told to the driver", e.driver.Name)
		obj = &storagev1.CSIDriver{}
	case err != nil:
		e.skip(name, "CSIDriver %s was not read (%s); the roles do not need that permission, this command does", e.driver.Name, reason(err))
		return
	default:
		e.ok(name, "%s is there, podInfoOnMount %t, fsGroupPolicy %s", obj.Name, ptr.Deref(obj.Spec.PodInfoOnMount, false), ptr.Deref(obj.Spec.FSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy))
	}
	if !e.known {
		e.skip("csidriver attachRequired", "what the driver can do is not known")
		return
	}
	e.report.Checks = append(e.report.Checks, e.attachRequired(obj), e.storageCapacity(obj), e.lifecycle(obj))
}

// attachRequired compares that field, which is true where it is not set.
func (e *examination) attachRequired(obj *storagev1.CSIDriver) Check {
	required, publishes := ptr.Deref(obj.Spec.AttachRequired, true), e.driver.Controller.PublishUnpublishVolume
	c := Check{Name: "csidriver attachRequired", Status: OK}
	switch {
	case required == publishes:
		c.Message = fmt.Sprintf("%t, and so is PUBLISH_UNPUBLISH_VOLUME", required)
	case publishes:
		c.Status, c.Message = Failure, "false, but the driver reports PUBLISH_UNPUBLISH_VOLUME: volumes are mounted without ControllerPublishVolume"
		c.Hint = "create the CSIDriver anew with attachRequired: true (the field cannot be changed where there are volumes in use)"
	case e.plan.runs("attacher"):
		c.Status, c.Message = Warning, "true, but the driver does not report PUBLISH_UNPUBLISH_VOLUME: each attachment is only marked as attached, which delays every pod"
		c.Hint = "set attachRequired: false and leave the attacher out"
	default:
		c.Status, c.Message = Failure, "true, but the driver does not report PUBLISH_UNPUBLISH_VOLUME and the attacher is not run: pods wait for attachments for ever"
		c.Hint = "set attachRequired: false, or have the attacher run (--controllers with attacher)"
		if e.plan.Selected {
			c.Status, c.Message = Warning, strings.Replace(c.Message, "is not run", "is not among --controllers", 1)
		}
	}
	return c
}

// storageCapacity compares that field with whether anybody publishes capacity.
func (e *examination) storageCapacity(obj *storagev1.CSIDriver) Check {
	used, can := ptr.Deref(obj.Spec.StorageCapacity, false), e.driver.Controller.GetCapacity
	c := Check{Name: "csidriver storageCapacity", Status: OK, Message: fmt.Sprint(used)}
	switch {
	case used && !can:
		c.Status, c.Message = Failure, "true, but the driver does not report GET_CAPACITY: nobody can publish capacity, and the scheduler finds no node for pods with late binding"
		c.Hint = "set storageCapacity: false"
	case used && !e.plan.Capacity:
		c.Status, c.Message = Failure, "true, but the role capacity is not run: the scheduler finds no node for pods with late binding"
		c.Hint = "run it, or set storageCapacity: false"
		if e.plan.Selected {
			c.Status = Warning
		}
	case !used && e.plan.Capacity:
		c.Status, c.Message = Warning, "false, although capacity is published: the scheduler does not look at it"
		c.Hint = "set storageCapacity: true once the first objects are there"
	}
	return c
}

func (e *examination) lifecycle(obj *storagev1.CSIDriver) Check {
	modes := obj.Spec.VolumeLifecycleModes
	if len(modes) == 0 {
		modes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
	}
	var have []string
	for _, m := range modes {
		have = append(have, string(m))
	}
	c := Check{Name: "csidriver volumeLifecycleModes", Status: OK, Message: strings.Join(have, ", ")}
	if !slices.Contains(modes, storagev1.VolumeLifecyclePersistent) && e.driver.Controller.CreateDeleteVolume {
		c.Status, c.Message = Failure, c.Message+" only, without Persistent, but the driver reports CREATE_DELETE_VOLUME: kubelets refuse its volumes"
		c.Hint = "create the CSIDriver anew with Persistent among its volumeLifecycleModes"
	}
	return c
}
