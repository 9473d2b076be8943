// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"strings"
	"testing"

	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// bound changes a claim of 5Gi whose volume has 1Gi.
func bound(change func(*corev1.PersistentVolumeClaim)) *facts {
	f := claimOf("5Gi")
	claim := f.claim.Value
	claim.Spec.VolumeName = "pv"
	claim.Status.Phase = corev1.ClaimBound
	claim.Status.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	change(claim)
	return f
}

// stage sets the stage of an expansion to size.
func stage(size string, s corev1.ClaimResourceStatus) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		c.Status.AllocatedResources = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
		c.Status.AllocatedResourceStatuses = map[corev1.ResourceName]corev1.ClaimResourceStatus{corev1.ResourceStorage: s}
	}
}

func withCondition(
	change func(*corev1.PersistentVolumeClaim), kind corev1.PersistentVolumeClaimConditionType, message string,
) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) {
		change(c)
		c.Status.Conditions = append(c.Status.Conditions, corev1.PersistentVolumeClaimCondition{
			Type: kind, Status: corev1.ConditionTrue, Message: message, LastTransitionTime: metav1.NewTime(now)})
	}
}

func TestExpansion(t *testing.T) {
	full := func(c *corev1.PersistentVolumeClaim) { c.Status.Capacity = c.Spec.Resources.Requests }
	none := func(*corev1.PersistentVolumeClaim) {}
	const lower = "Or lower spec.resources.requests.storage of the claim, to more than 1Gi."
	for name, tt := range map[string]struct {
		change     func(*corev1.PersistentVolumeClaim)
		severity   finding.Severity
		want, next string
	}{
		"nothing to do": {full, finding.OK, "", ""},
		"requested":     {none, finding.Waiting, "The claim requests 5Gi, the volume has 1Gi.", "calls ControllerExpandVolume"},
		"in progress": {stage("4Gi", corev1.PersistentVolumeClaimControllerResizeInProgress), finding.Waiting,
			"from 1Gi to 4Gi is in progress",
			"repeats ControllerExpandVolume"},
		"final error": {withCondition(stage("4Gi", corev1.PersistentVolumeClaimControllerResizeInProgress),
			corev1.PersistentVolumeClaimControllerResizeError, "no license"), finding.Failing,
			"from 1Gi to 4Gi failed (condition ControllerResizeError for 0s): no license.",
			"the log of the resizer has the details. " + lower},
		"infeasible": {withCondition(stage("4Gi", corev1.PersistentVolumeClaimControllerResizeInfeasible),
			corev1.PersistentVolumeClaimControllerResizeError, "failed: rpc error: code = InvalidArgument desc = no secret"),
			finding.Failing,
			"Expanding the volume from 1Gi to 4Gi is infeasible (condition ControllerResizeError for 0s): failed: rpc error: " +
				"code = InvalidArgument desc = no secret.",
			"Retries automatically. Fix the error shown above; the log of the driver container (`kubectl logs`) has the details. " + lower},
		"permission is missing": {withCondition(stage("4Gi", corev1.PersistentVolumeClaimControllerResizeInProgress),
			corev1.PersistentVolumeClaimControllerResizeError, `secrets "s" is forbidden: User "u" cannot get resource "secrets"`), finding.Failing,
			"is forbidden", "`storage-controller doctor --print-rbac`"},
		"not requested any more": {func(c *corev1.PersistentVolumeClaim) {
			stage("5Gi", corev1.PersistentVolumeClaimControllerResizeInfeasible)(c)
			full(c)
		}, finding.OK, "", ""},
		"kept by the kubelet": {func(c *corev1.PersistentVolumeClaim) {
			stage("5Gi", corev1.PersistentVolumeClaimNodeResizeInProgress)(c)
			full(c)
		}, finding.OK, "", ""},
		"for the node": {withCondition(stage("5Gi", corev1.PersistentVolumeClaimNodeResizePending),
			corev1.PersistentVolumeClaimFileSystemResizePending, ""), finding.Waiting,
			"has 5Gi at the driver, and 1Gi on the node.",
			"while a pod with the claim runs"},
		"old API server": {withCondition(none, corev1.PersistentVolumeClaimFileSystemResizePending, ""), finding.Waiting,
			"has 5Gi at the driver",
			"while a pod with the claim runs"},
		"on the node": {stage("5Gi", corev1.PersistentVolumeClaimNodeResizeInProgress), finding.Waiting,
			"Expanding the volume to 5Gi on the node is in progress.",
			"NodeExpandVolume"},
		"failed on the node": {withCondition(stage("5Gi", corev1.PersistentVolumeClaimNodeResizeInProgress),
			corev1.PersistentVolumeClaimNodeResizeError, "xfs"), finding.Failing,
			"on the node failed (condition NodeResizeError for 0s): xfs.", lower},
		"infeasible on the node": {stage("5Gi", corev1.PersistentVolumeClaimNodeResizeInfeasible), finding.Failing,
			"Expanding the volume to 5Gi on the node is infeasible, and condition NodeResizeError is not set.",
			lower},
	} {
		t.Run(name, func(t *testing.T) {
			f := bound(tt.change)
			e := &explanation{facts: f}
			explainExpansion(e)
			wantFinding(t, e, tt.severity, tt.want, tt.next)
			if rest := f.nextOfClaim(); strings.HasPrefix(rest, "Nothing to do") != (tt.want == "") {
				t.Errorf("next step: %s", rest)
			}
		})
	}
}

// wantFinding fails the test unless e has exactly this finding, or none for an empty sentence.
func wantFinding(t *testing.T, e *explanation, severity finding.Severity, want, next string) {
	t.Helper()
	switch got := e.findings; {
	case want == "" && len(got) == 0:
	case len(got) != 1 || got[0].Severity != severity || !strings.Contains(got[0].Message, want) || !strings.Contains(got[0].Next, next):
		t.Errorf("got %+v", got)
	}
}

func TestModification(t *testing.T) {
	wants := func(class string, status *corev1.ModifyVolumeStatus) func(*corev1.PersistentVolumeClaim) {
		return func(c *corev1.PersistentVolumeClaim) {
			current := "silver"
			c.Spec.VolumeAttributesClassName, c.Status.CurrentVolumeAttributesClassName, c.Status.ModifyVolumeStatus = &class, &current,
				status
		}
	}
	status := func(s corev1.PersistentVolumeClaimModifyVolumeStatus) *corev1.ModifyVolumeStatus {
		return &corev1.ModifyVolumeStatus{TargetVolumeAttributesClassName: "gold", Status: s}
	}
	class := func(driver string) apiread.Result[*storagev1.VolumeAttributesClass] {
		return apiread.Found(&storagev1.VolumeAttributesClass{DriverName: driver})
	}
	refused := func(s corev1.PersistentVolumeClaimModifyVolumeStatus) func(*corev1.PersistentVolumeClaim) {
		return withCondition(wants("gold", status(s)), corev1.PersistentVolumeClaimVolumeModifyVolumeError, "iops")
	}
	for name, tt := range map[string]struct {
		change     func(*corev1.PersistentVolumeClaim)
		class      apiread.Result[*storagev1.VolumeAttributesClass]
		severity   finding.Severity
		want, next string
	}{
		"nothing to do": {wants("silver", nil), class("d"), finding.OK, "", ""},
		"requested": {wants("gold", nil), class("d"), finding.Waiting, `requests VolumeAttributesClass "gold", the volume has "silver"`,
			"ControllerModifyVolume"},
		"no class": {wants("gold", status("Pending")), apiread.Result[*storagev1.VolumeAttributesClass]{Missing: true}, finding.Blocked,
			`"gold" not found`, "Create"},
		"another driver": {wants("gold", status("Pending")), class("e"), finding.Blocked, `belongs to driver "e", the volume to "d"`,
			"such as the current one, silver"},
		"in progress": {wants("gold", status("InProgress")), class("d"), finding.Waiting, `VolumeAttributesClass "gold" is in progress`,
			"repeats ControllerModifyVolume"},
		"final error": {refused("InProgress"), class("d"), finding.Failing, `Applying VolumeAttributesClass "gold" failed (condition ModifyVolumeError for 0s): iops.`,
			"Retries"},
		"infeasible": {refused("Infeasible"), class("d"), finding.Failing,
			`Applying VolumeAttributesClass "gold" is infeasible (condition ModifyVolumeError for 0s): iops.`,
			"Or set spec.volumeAttributesClassName of the claim to a class that the driver accepts, such as the current one, silver."},
		"infeasible, and unset": {withCondition(wants("", status("Infeasible")),
			corev1.PersistentVolumeClaimVolumeModifyVolumeError, "iops"), class("d"), finding.Waiting, `The claim requests no VolumeAttributesClass; its status still names "gold" (Infeasible).`,
			"Nothing is requested of the driver."},
		"in progress, and unset": {wants("", status("InProgress")), class("d"), finding.Waiting, `"gold" is in progress`,
			"repeats ControllerModifyVolume"},
		"infeasible, and another is requested": {withCondition(wants("bronze", status("Infeasible")),
			corev1.PersistentVolumeClaimVolumeModifyVolumeError, "iops"), class("d"), finding.Waiting,
			`requests VolumeAttributesClass "bronze", the volume has "silver"`, "ControllerModifyVolume"},
		"no such kind": {wants("gold", nil), apiread.Result[*storagev1.VolumeAttributesClass]{Missing: true, Unserved: true},
			finding.Blocked,
			"does not serve VolumeAttributesClasses", "Upgrade"},
		"class is unread": {wants("gold", nil), apiread.Result[*storagev1.VolumeAttributesClass]{}, finding.Waiting, `"gold"`,
			"calls ControllerModifyVolume"},
	} {
		t.Run(name, func(t *testing.T) {
			f := bound(tt.change)
			f.attributes = tt.class
			e := &explanation{facts: f}
			explainModification(e)
			wantFinding(t, e, tt.severity, tt.want, tt.next)
		})
	}
}
