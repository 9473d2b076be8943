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
)

// worst is the finding that most keeps an object from going on.
func (l findings) worst() Finding {
	worst := Finding{Severity: Fine}
	for _, f := range l {
		if ranks[f.Severity] > ranks[worst.Severity] {
			worst = f
		}
	}
	return worst
}

const ebs = "ebs.csi.aws.com"

// TestClassOfAnotherProvisioner: with CSI migration the claim names the driver, and the
// class the plugin that it has replaced.
func TestClassOfAnotherProvisioner(t *testing.T) {
	for name, test := range map[string]struct {
		owner, class string
		want         Severity
	}{
		"the same":                         {"d", "d", Fine},
		"the plugin that the driver was":   {ebs, "kubernetes.io/aws-ebs", Fine},
		"the plugin that another one was":  {ebs, "kubernetes.io/gce-pd", Blocked},
		"a plugin that was never migrated": {ebs, "kubernetes.io/glusterfs", Blocked},
		"another driver":                   {ebs, "d", Blocked},
		"not given to anybody":             {"", "kubernetes.io/aws-ebs", Fine},
	} {
		t.Run(name, func(t *testing.T) {
			f := claimOf("5Gi")
			f.class.value.Provisioner = test.class
			if test.owner != "" {
				f.claim.value.Annotations = map[string]string{storagehelpers.AnnStorageProvisioner: test.owner}
			}
			if got := f.aboutClass().worst(); got.Severity != test.want {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestVolumeOfSomebodyElse(t *testing.T) {
	claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", UID: "u"}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pv"}}
	for name, test := range map[string]struct {
		ref  *corev1.ObjectReference
		want Severity
	}{
		"of nobody":                     {nil, Waiting},
		"reserved for it":               {&corev1.ObjectReference{Namespace: "ns", Name: "c"}, Waiting},
		"of it":                         {&corev1.ObjectReference{Namespace: "ns", Name: "c", UID: "u"}, Waiting},
		"of one that had its name":      {&corev1.ObjectReference{Namespace: "ns", Name: "c", UID: "v"}, Blocked},
		"reserved for another":          {&corev1.ObjectReference{Namespace: "ns", Name: "d"}, Blocked},
		"reserved in another namespace": {&corev1.ObjectReference{Namespace: "os", Name: "c"}, Blocked},
	} {
		t.Run(name, func(t *testing.T) {
			f := &facts{now: now, claim: have(claim), volume: have(&corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{ClaimRef: test.ref}})}
			if got := f.aboutBinding().worst(); got.Severity != test.want || strings.Contains(got.Sentence, "UID )") {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestAttachmentOfAnotherDriver(t *testing.T) {
	of := func(source corev1.PersistentVolumeSource) *corev1.PersistentVolume {
		return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{PersistentVolumeSource: source}}
	}
	foreign := of(corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "other"}})
	for name, test := range map[string]struct {
		volume  *corev1.PersistentVolume
		deleted bool
		want    Severity
		next    string
	}{
		"its own":                         {of(corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: ebs}}), false, Fine, ""},
		"of the plugin that it was":       {of(corev1.PersistentVolumeSource{AWSElasticBlockStore: &corev1.AWSElasticBlockStoreVolumeSource{VolumeID: "vol-1"}}), false, Fine, ""},
		"of another":                      {foreign, false, Blocked, "Whoever made the attachment deletes it."},
		"of another, and deleted already": {foreign, true, Failing, "external-attacher/ebs-csi-aws-com"},
	} {
		t.Run(name, func(t *testing.T) {
			va := &storagev1.VolumeAttachment{Spec: storagev1.VolumeAttachmentSpec{Attacher: ebs, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: ptr.To("pv")}}}
			if test.deleted {
				va.DeletionTimestamp, va.Finalizers = ptr.To(metav1.NewTime(now)), []string{attacherFinalizer(ebs)}
			}
			f := &facts{now: now, driver: ebs, attachment: have(va), volume: have(test.volume)}
			got := f.aboutAttachedVolume().worst()
			if got.Severity != test.want || !strings.Contains(got.Next, test.next) || test.deleted && strings.Contains(got.Next, "deletes") {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// TestLeaseOfAnOption: a nodecontroller that ran once is not missed, unless something is
// left to it.
func TestLeaseOfAnOption(t *testing.T) {
	released := coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "l"}}
	orphan := func(notes map[string]string) *corev1.PersistentVolume {
		return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Annotations: notes}, Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "d"}}}}
	}
	deleted := &corev1.Node{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: ptr.To(metav1.NewTime(now)), Finalizers: []string{"d/node"}}}
	for name, test := range map[string]struct {
		facts facts
		role  string
		want  Severity
	}{
		"of a role that is needed":      {facts{volume: have(orphan(nil))}, roleProvisioner, Blocked},
		"of the option":                 {facts{volume: have(orphan(nil))}, roleNodecontroller, Unknown},
		"a volume waits for it":         {facts{volume: have(orphan(map[string]string{"d/lost-node": "n"}))}, roleNodecontroller, Blocked},
		"a node waits for it":           {facts{node: have(deleted)}, roleNodecontroller, Blocked},
		"a node that is there does not": {facts{node: have(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Finalizers: []string{"d/node"}}})}, roleNodecontroller, Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			test.facts.now = now
			for _, renewed := range []*metav1.MicroTime{nil, ptr.To(metav1.NewMicroTime(now.Add(-time.Hour)))} {
				lease := released
				if lease.Spec.RenewTime = renewed; renewed != nil {
					lease.Spec.HolderIdentity = ptr.To("pod")
				}
				got := test.facts.aboutLease(leaseFact{role: test.role, driver: "d", name: "l", leases: have([]coordinationv1.Lease{lease})})
				if len(got) != 1 || got[0].Severity != test.want || (got[0].Next == "") != (test.want == Unknown) {
					t.Errorf("got %+v", got)
				}
			}
		})
	}
}

// TestManyAttachmentsFail: a node with thousands of them is still explained on a page.
func TestManyAttachmentsFail(t *testing.T) {
	f := &facts{now: now, node: have(&corev1.Node{}), attachments: have([]storagev1.VolumeAttachment(nil))}
	for i := range 2500 {
		message := "too many volumes"
		if i%2 == 1 {
			message = fmt.Sprintf("no volume %d", i)
		}
		f.attachments.value = append(f.attachments.value, storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("va-", i)},
			Status: storagev1.VolumeAttachmentStatus{AttachError: &storagev1.VolumeError{Time: metav1.NewTime(now.Add(-time.Minute)), Message: message}}})
	}
	l := f.aboutNodeAttachments("n")
	text := fmt.Sprint(l)
	if len(l) != 12 || len(text) > 3000 {
		t.Errorf("%d findings: %.3000s", len(l), text)
	}
	for _, want := range []string{
		"VolumeAttachment va-0 and 1249 more cannot be attached, 1m0s ago: too many volumes.",
		"VolumeAttachment va-1 cannot be attached, 1m0s ago: no volume 1.",
		"1241 more VolumeAttachments with other errors",
		"2500 VolumeAttachments for node \"n\", 0 of which are attached, and 2500 with errors.",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("it does not say: %s", want)
		}
	}
}
