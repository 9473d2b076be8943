// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// worst returns the worst finding.
func (e *explanation) worst() finding.Finding {
	worst := finding.Finding{Severity: finding.OK}
	for _, f := range e.findings {
		if f.Severity.Exceeds(worst.Severity) {
			worst = f
		}
	}
	return worst
}

const ebs = "ebs.csi.aws.com"

// TestClassOfAnotherProvisioner: with CSI migration the claim names the driver, and the class the in-tree plugin.
func TestClassOfAnotherProvisioner(t *testing.T) {
	for name, test := range map[string]struct {
		owner, class string
		want         finding.Severity
		driver       string
	}{
		"the same":                         {"d", "d", finding.OK, "d"},
		"the plugin migrated to it":        {ebs, "kubernetes.io/aws-ebs", finding.OK, ebs},
		"a plugin migrated to another":     {ebs, "kubernetes.io/gce-pd", finding.Blocked, ebs},
		"a plugin that was never migrated": {ebs, "kubernetes.io/glusterfs", finding.Blocked, ebs},
		"another driver":                   {ebs, "d", finding.Blocked, ebs},
		"not assigned":                     {"", "kubernetes.io/aws-ebs", finding.OK, ebs},
		"not assigned to a driver":         {"", "d", finding.OK, "d"},
	} {
		t.Run(name, func(t *testing.T) {
			f := claimOf("5Gi")
			f.class.Value.Provisioner = test.class
			if test.owner != "" {
				f.claim.Value.Annotations = map[string]string{storagehelpers.AnnStorageProvisioner: test.owner}
			}
			e := &explanation{facts: f}
			explainClass(e)
			if got := e.worst(); got.Severity != test.want {
				t.Errorf("got %+v", got)
			}
			if got := driverOfClaim(f.claim.Value, f.class.Value); got != test.driver {
				t.Errorf("got driver %s", got)
			}
		})
	}
}

func TestVolumeOfAnotherClaim(t *testing.T) {
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", UID: "u"},
		Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv"}}
	for name, test := range map[string]struct {
		ref  *corev1.ObjectReference
		want finding.Severity
	}{
		"unreserved":                      {nil, finding.Waiting},
		"reserved for it":                 {&corev1.ObjectReference{Namespace: "ns", Name: "c"}, finding.Waiting},
		"of it":                           {&corev1.ObjectReference{Namespace: "ns", Name: "c", UID: "u"}, finding.Waiting},
		"of an earlier claim of the name": {&corev1.ObjectReference{Namespace: "ns", Name: "c", UID: "v"}, finding.Blocked},
		"reserved for another":            {&corev1.ObjectReference{Namespace: "ns", Name: "d"}, finding.Blocked},
		"reserved in another namespace":   {&corev1.ObjectReference{Namespace: "os", Name: "c"}, finding.Blocked},
	} {
		t.Run(name, func(t *testing.T) {
			f := &facts{now: now, claim: apiread.Found(claim),
				volume: apiread.Found(&corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{ClaimRef: test.ref}})}
			e := &explanation{facts: f}
			explainBinding(e)
			if got := e.worst(); got.Severity != test.want || strings.Contains(got.Message, "UID )") {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestAttachmentOfAnotherDriver(t *testing.T) {
	of := func(source corev1.PersistentVolumeSource) *corev1.PersistentVolume {
		return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"},
			Spec: corev1.PersistentVolumeSpec{PersistentVolumeSource: source}}
	}
	inTree := of(corev1.PersistentVolumeSource{AWSElasticBlockStore: &corev1.AWSElasticBlockStoreVolumeSource{VolumeID: "vol-1"}})
	foreign := of(corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "other"}})
	for name, test := range map[string]struct {
		volume  *corev1.PersistentVolume
		deleted bool
		want    finding.Severity
		next    string
	}{
		"its own": {of(corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: ebs}}), false,
			finding.OK, ""},
		"of the plugin migrated to it": {inTree, false, finding.OK, ""},
		"of another":                   {foreign, false, finding.Blocked, "Delete the VolumeAttachment."},
		"of another, and Terminating":  {foreign, true, finding.Failing, "external-attacher/ebs-csi-aws-com"},
	} {
		t.Run(name, func(t *testing.T) {
			va := &storagev1.VolumeAttachment{Spec: storagev1.VolumeAttachmentSpec{Attacher: ebs,
				Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To("pv")}}}
			if test.deleted {
				va.DeletionTimestamp, va.Finalizers = ptr.To(metav1.NewTime(now)), []string{attacher.Finalizer(ebs)}
			}
			f := &facts{now: now, driver: ebs, attachment: apiread.Found(va), volume: apiread.Found(test.volume)}
			e := &explanation{facts: f}
			explainAttachedVolume(e)
			got := e.worst()
			if got.Severity != test.want || !strings.Contains(got.Next, test.next) ||
				test.deleted && strings.Contains(strings.ToLower(got.Next), "delete") {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// TestLeaseOfAnOption: a nodecontroller without a holder is only reported if it has work.
func TestLeaseOfAnOption(t *testing.T) {
	released := coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "l"}}
	volume := apiread.Found(&corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "d"}}}})
	deleted := &corev1.Node{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: ptr.To(metav1.NewTime(now)), Finalizers: []string{"d/node"}}}
	for name, test := range map[string]struct {
		facts facts
		role  string
		want  finding.Severity
	}{
		"of a required role":       {facts{volume: volume}, roleProvisioner, finding.Blocked},
		"of the nodecontroller":    {facts{volume: volume}, roleNodecontroller, finding.Unknown},
		"a lost node waits for it": {facts{volume: volume, lost: []lostNode{{driver: "d"}}}, roleNodecontroller, finding.Blocked},
		"a node waits for it":      {facts{node: apiread.Found(deleted)}, roleNodecontroller, finding.Blocked},
		"a node that is not deleted": {
			facts{node: apiread.Found(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Finalizers: []string{"d/node"}}})},
			roleNodecontroller, finding.Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			test.facts.now = now
			for _, renewed := range []*metav1.MicroTime{nil, ptr.To(metav1.NewMicroTime(now.Add(-time.Hour)))} {
				lease := released
				if lease.Spec.RenewTime = renewed; renewed != nil {
					lease.Spec.HolderIdentity = ptr.To("pod")
				}
				f := test.facts
				f.leases = []leaseFact{{role: test.role, driver: "d", name: "l", leases: apiread.Found([]*coordinationv1.Lease{&lease})}}
				e := &explanation{facts: &f}
				explainLeases(e)
				got := e.findings
				if len(got) != 1 || got[0].Severity != test.want || (got[0].Next == "") != (test.want == finding.Unknown) {
					t.Errorf("got %+v", got)
				}
			}
		})
	}
}

// TestManyAttachmentsFail: the report of a node with thousands of failures stays short.
func TestManyAttachmentsFail(t *testing.T) {
	f := &facts{now: now, node: apiread.Found(&corev1.Node{}), attachments: apiread.Found([]*storagev1.VolumeAttachment(nil))}
	for i := range 2500 {
		message := "too many volumes"
		if i%2 == 1 {
			message = fmt.Sprintf("no volume %d", i)
		}
		failure := &storagev1.VolumeError{Time: metav1.NewTime(now.Add(-time.Minute)), Message: message}
		f.attachments.Value = append(f.attachments.Value, &storagev1.VolumeAttachment{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("va-", i)}, Status: storagev1.VolumeAttachmentStatus{AttachError: failure}})
	}
	e := &explanation{facts: f}
	explainNodeAttachments(e, "n")
	l := e.findings
	text := fmt.Sprint(l)
	if len(l) != 12 || len(text) > 3000 {
		t.Errorf("%d findings: %.3000s", len(l), text)
	}
	for _, want := range []string{
		"VolumeAttachment va-0 and 1249 more cannot be attached, last attempt 60s ago: too many volumes.",
		"VolumeAttachment va-1 cannot be attached, last attempt 60s ago: no volume 1.",
		"1241 more VolumeAttachments with other errors",
		`2500 VolumeAttachments for node "n": 0 attached, 2500 with errors.`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("missing: %s", want)
		}
	}
}

// TestNextStepOfFailures: the text of an error decides whom it concerns.
func TestNextStepOfFailures(t *testing.T) {
	for want, f := range map[string]failure{
		"Retries automatically in 5m. Check that the driver runs": {text: "rpc error: code = Canceled desc = y", again: " in 5m"},
		"the log of the driver container":                         {text: "x", code: "InvalidArgument"},
		"the logs of the resizer and of the driver container":     {text: "x", code: "Unknown", by: roleResizer},
		"the log of the attacher has": {local: true, by: "attacher",
			text: "quoted (rpc error: code = Internal desc = y)"},
		"Grant the permission that the error names":                {text: `pods is forbidden: User "u" cannot get resource "pods"`},
		"the log of the provisioner has":                           {text: `pods "x" is forbidden: exceeded quota`, by: roleProvisioner},
		"the log of the driver container (`kubectl logs`) has the": {text: `rpc error: code = Internal desc = is forbidden: User "u" cannot get`},
	} {
		if got := f.next(); !strings.Contains(got, want) {
			t.Errorf("%+v: %s", f, got)
		}
	}
}

// TestManyClaims: the report of a pod with many claims stays short.
func TestManyClaims(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}}
	f := &facts{pod: apiread.Found(pod)}
	for i := range 100 {
		c := claimOf("5Gi")
		if i%2 == 0 {
			c.class = apiread.Result[*storagev1.StorageClass]{Missing: true}
			c.claim.Value.Spec.StorageClassName = ptr.To(fmt.Sprint("class-", i))
		} else {
			c.claim.Value.Spec.VolumeName, c.claim.Value.Status.Phase = "pv", corev1.ClaimBound
		}
		f.podClaims = append(f.podClaims, podClaim{name: fmt.Sprint("c-", i), facts: c})
	}
	f.podClaims = append(f.podClaims, podClaim{name: "none", facts: &facts{}, err: ErrNotFound})
	r := explainPod(f)
	text := fmt.Sprint(r.Findings)
	if len(r.Findings) > 2*maxClaims+3 || len(text) > 4000 {
		t.Errorf("%d findings: %.4000s", len(r.Findings), text)
	}
	for _, want := range []string{`StorageClass "class-18" not found.`, "Nothing is to be done for 50 claims: c-1, c-3",
		"There are findings about 41 more claims: c-20, c-22"} {
		if !strings.Contains(text, want) {
			t.Errorf("missing: %s", want)
		}
	}
}

// TestManyPendingPods: the report of a claim names some of the pods that use it.
func TestManyPendingPods(t *testing.T) {
	f := bound(func(*corev1.PersistentVolumeClaim) {})
	for i := range 100 {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprintf("p-%02d", i)}}
		pod.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}}
		switch i {
		case 0:
			pod.Status.Phase = corev1.PodRunning
		case 1:
			pod.Status.ContainerStatuses = []corev1.ContainerStatus{{ContainerID: "started"}}
		case 2:
			pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
				Reason: corev1.PodReasonSchedulingGated}}
		case 3:
			pod.Spec.NodeName = "n"
		}
		f.pods.Value = append(f.pods.Value, pod)
	}
	e := &explanation{facts: f}
	explainPendingPods(e)
	text := fmt.Sprint(e.findings)
	for _, want := range []string{`Pod "p-02" has scheduling gates.`, `Pod "p-03", which uses the claim, has not started on node "n".`,
		`93 more pods that use the claim have not started.`} {
		if !strings.Contains(text, want) || len(e.findings) != maxPods+1 {
			t.Errorf("%s: %s", want, text)
		}
	}
}

// TestSecretsThatCannotBeResolved: an annotation that the claim lacks is no reason to recreate the class.
func TestSecretsThatCannotBeResolved(t *testing.T) {
	const prefix = volumerules.ParameterPrefix + "provisioner-secret-"
	for template, want := range map[string]string{
		"":                          "Recreate StorageClass \"fast\" with valid parameters.",
		"${pvc.annotations['x/k']}": "Add the annotations that the templates name to the claim.",
		"${pvc.name}":               "",
	} {
		f := claimOf("5Gi")
		f.class.Value.Parameters = map[string]string{prefix + "name": template, prefix + "namespace": "ns"}
		_, f.secretsErr = volumerules.ResolveSecrets(f.class.Value.Parameters, volumerules.SecretScope{Claim: "c", Namespace: "ns"})
		e := &explanation{facts: f}
		explainClass(e)
		if got := e.worst(); !strings.HasPrefix(got.Next, want) || want == "" && got.Severity != finding.OK {
			t.Errorf("%q: %+v", template, got)
		}
	}
}

// TestMissingSecrets: only the secret of the next operation holds up the object.
func TestMissingSecrets(t *testing.T) {
	volume := func(phase corev1.PersistentVolumePhase) *facts {
		f := claimOf("5Gi")
		f.volume = apiread.Found(&corev1.PersistentVolume{Status: corev1.PersistentVolumeStatus{Phase: phase}})
		return f
	}
	expanding := bound(func(*corev1.PersistentVolumeClaim) {})
	expanding.volume = volume(corev1.VolumeBound).volume
	for name, test := range map[string]struct {
		facts   *facts
		purpose volumerules.Purpose
		want    finding.Severity
	}{
		"to create a volume":          {claimOf("5Gi"), volumerules.Provisioner, finding.Blocked},
		"of a claim without a volume": {claimOf("5Gi"), volumerules.NodeExpand, finding.Waiting},
		"to delete a volume":          {volume(corev1.VolumeReleased), volumerules.Provisioner, finding.Waiting},
		"to attach a volume of a driver that does not attach": {func() *facts {
			f := volume(corev1.VolumeBound)
			f.csiDriver.Value.Spec.AttachRequired = ptr.To(false)
			return f
		}(), volumerules.ControllerPublish, finding.Waiting},
		"to attach a volume":            {volume(corev1.VolumeBound), volumerules.ControllerPublish, finding.Blocked},
		"to detach a volume":            {volume(corev1.VolumeReleased), volumerules.ControllerPublish, finding.Blocked},
		"to mount a volume":             {volume(corev1.VolumeBound), volumerules.NodeStage, finding.Blocked},
		"to mount a released volume":    {volume(corev1.VolumeReleased), volumerules.NodePublish, finding.Waiting},
		"to expand a volume":            {expanding, volumerules.ControllerExpand, finding.Blocked},
		"to expand a volume at no time": {volume(corev1.VolumeBound), volumerules.NodeExpand, finding.Waiting},
	} {
		test.facts.secrets = []secretFact{{purposes: []volumerules.Purpose{test.purpose},
			object: apiread.Result[*metav1.PartialObjectMetadata]{Missing: true}}}
		e := &explanation{facts: test.facts}
		explainSecrets(e)
		if got := e.findings; len(got) != 1 || got[0].Severity != test.want || !strings.HasPrefix(got[0].Next, "Create Secret") {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
