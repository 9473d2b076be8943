package provisioner

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

const uid = "01234567-89ab-cdef-0123-456789abcdef"

var now = time.Unix(1_700_000_000, 0)

func testDriver(change func(*driver)) driver {
	d := driver{Config: DefaultConfig(), name: "drv.example.com", controllerService: true, createsVolumes: true, publishes: true, identity: "me"}
	if change != nil {
		change(&d)
	}
	return d
}

func testClaim(change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
	pvc := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "data", UID: uid, ResourceVersion: "7",
			Annotations: map[string]string{storagehelpers.AnnStorageProvisioner: "drv.example.com"}},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: ptr.To("fast"), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1500M")}},
		},
	}
	if change != nil {
		change(pvc)
	}
	return pvc
}

func testClass(change func(*storagev1.StorageClass)) *storagev1.StorageClass {
	c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "fast", UID: "class-1", ResourceVersion: "1"}, Provisioner: "drv.example.com"}
	if change != nil {
		change(c)
	}
	return c
}

func late(c *storagev1.StorageClass) {
	c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)
}

func testAttempt(change func(*attempt)) *attempt {
	d := testDriver(nil)
	request, p, err := d.prepare(testClaim(nil), testClass(nil), "", nil, nil)
	if err != nil {
		panic(err)
	}
	a := &attempt{claim: testClaim(nil), request: request, plan: p}
	if change != nil {
		change(a)
	}
	return a
}

func doubt(a *attempt) { a.doubt = true }

func protected(pvc *corev1.PersistentVolumeClaim) { pvc.Finalizers = []string{claimFinalizer} }

func deleting(pvc *corev1.PersistentVolumeClaim) { pvc.DeletionTimestamp = &metav1.Time{Time: now} }

func ourVolume() *corev1.PersistentVolume {
	return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pvc-" + uid}, Spec: corev1.PersistentVolumeSpec{ClaimRef: &corev1.ObjectReference{UID: uid}}}
}

func releasedVolume() *corev1.PersistentVolume {
	pv := ourVolume()
	pv.Status.Phase = corev1.VolumeReleased
	return pv
}

func TestDecide(t *testing.T) {
	foreign := ourVolume()
	foreign.Spec.ClaimRef.UID = "other"
	zones := world([]string{"zone"}, map[string]string{"zone": "a"})
	can := func(d *driver) { d.restores, d.clones, d.modifies, d.topology = true, true, true, false }
	from := func(kind string, changes ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
		return testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: kind, Name: "x"}
			if kind == kube.KindSnapshot {
				c.Spec.DataSource.APIGroup = ptr.To(volumerules.SnapshotGroup)
			}
			for _, change := range changes {
				change(c)
			}
		})
	}
	attributes := func(name string) *corev1.PersistentVolumeClaim {
		return testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeAttributesClassName = &name })
	}
	alpha := func(c *corev1.PersistentVolumeClaim) { c.Annotations[annSelectedNodeAlpha] = "node-9" }
	errGone := errors.New("it is gone")
	snapshotX := func(change func(*found)) *found {
		f := &found{source: &sourceKey{Kind: kube.KindSnapshot, Namespace: "ns", Name: "x"}, content: &csi.VolumeContentSource{}}
		if change != nil {
			change(f)
		}
		return f
	}
	tests := map[string]struct {
		driver   func(*driver)
		claim    *corev1.PersistentVolumeClaim
		class    *storagev1.StorageClass
		volume   *corev1.PersistentVolume
		progress progress
		named    *found
		want     action
		reason   string
		err      error
	}{
		"a claim that is gone": {want: doForget, reason: "Gone"},
		"a new claim":          {claim: testClaim(nil), class: testClass(nil), want: doStart, reason: "Wanted"},
		"bound already":        {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "x" }), class: testClass(nil), want: doForget, reason: "Bound"},
		"its volume exists":    {claim: testClaim(nil), class: testClass(nil), volume: ourVolume(), want: doNothing, reason: "Saved"},
		"its volume was saved and is gone from the cache": {claim: testClaim(nil), class: testClass(nil), progress: progress{saved: true}, want: doNothing, reason: "Saved"},
		"the name of its volume is taken":                 {claim: testClaim(nil), class: testClass(nil), volume: foreign, want: doFail, reason: "NameTaken"},
		"deleted before anything began":                   {claim: testClaim(deleting), class: testClass(nil), want: doForget, reason: "Deleting"},
		"without an owner":                                {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations = nil }), class: testClass(nil), want: doForget, reason: "OfAnotherDriver"},
		"with the beta annotation alone": {claim: testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Annotations = map[string]string{storagehelpers.AnnBetaStorageProvisioner: "drv.example.com"}
		}), class: testClass(nil), want: doStart, reason: "Wanted"},
		"of another owner, though the beta annotation is ours": {claim: testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Annotations = map[string]string{storagehelpers.AnnStorageProvisioner: "other", storagehelpers.AnnBetaStorageProvisioner: "drv.example.com"}
		}), class: testClass(nil), want: doForget, reason: "OfAnotherDriver"},
		"without its class":         {claim: testClaim(nil), want: doRetry, reason: "NoClass"},
		"class of another driver":   {claim: testClaim(nil), class: testClass(func(c *storagev1.StorageClass) { c.Provisioner = "other" }), want: doForget, reason: "ClassOfAnotherDriver"},
		"late binding, no node yet": {claim: testClaim(nil), class: testClass(late), want: doForget, reason: "WaitsForPod"},
		"late binding, empty node":  {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = "" }), class: testClass(late), want: doForget, reason: "WaitsForPod"},
		"late binding, node chosen": {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = "node-0" }), class: testClass(late), want: doStart, reason: "Wanted"},
		"the chosen node is gone":   {driver: func(d *driver) { d.topology = true }, claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = "node-9" }), class: testClass(late), want: doReschedule, reason: "NodeGone", err: errNodeGone},
		"no topology on the chosen node": {driver: func(d *driver) { d.topology = true }, claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = "node-0" }),
			class: testClass(func(c *storagev1.StorageClass) { late(c); c.AllowedTopologies = allow(in("zone", "b")) }), want: doFail, reason: "CannotAsk", err: errTopology},
		"no topology on the chosen node, for the fifth time": {driver: func(d *driver) { d.topology = true }, claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = "node-0" }),
			class: testClass(func(c *storagev1.StorageClass) { late(c); c.AllowedTopologies = allow(in("zone", "b")) }), progress: progress{stuck: 4}, want: doReschedule, reason: "NoTopologyForLong", err: errTopology},
		"a selector, even an empty one": {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.Selector = &metav1.LabelSelector{} }), class: testClass(nil), want: doFail, reason: "CannotAsk"},
		"data from a populator": {claim: testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "Hello", Name: "x"}
		}), class: testClass(nil), want: doIgnore, reason: "Populator", err: volumerules.ErrPopulator},
		"late binding, node chosen by the alpha annotation": {claim: testClaim(alpha), class: testClass(late), want: doForget, reason: "WaitsForPod"},
		"the node of the alpha annotation is gone":          {driver: func(d *driver) { d.topology = true }, claim: testClaim(alpha), class: testClass(nil), want: doFail, reason: "CannotAsk", err: errNodeGone},
		"no topology for long, with the alpha annotation": {driver: func(d *driver) { d.topology = true },
			claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[annSelectedNodeAlpha] = "node-0" }),
			class: testClass(func(c *storagev1.StorageClass) { c.AllowedTopologies = allow(in("zone", "b")) }), progress: progress{stuck: 4}, want: doFail, reason: "CannotAsk", err: errTopology},

		"data from a snapshot":                             {driver: can, claim: from("VolumeSnapshot"), class: testClass(nil), want: doLookUp, reason: "NamesOthers"},
		"data from a snapshot, a driver that cannot":       {claim: from("VolumeSnapshot"), class: testClass(nil), want: doFail, reason: "CannotAsk"},
		"data from a snapshot that cannot be used":         {driver: can, claim: from("VolumeSnapshot"), class: testClass(nil), named: snapshotX(func(f *found) { f.err = errGone }), want: doFail, reason: "CannotAsk", err: errGone},
		"data from a snapshot that is not kept yet":        {driver: can, claim: from("VolumeSnapshot"), class: testClass(nil), named: snapshotX(nil), want: doGuard, reason: "Wanted"},
		"a source is not kept for a request with a defect": {driver: can, claim: from("VolumeSnapshot"), class: testClass(parameters(map[string]string{volumerules.ParameterPrefix + "secret-name": "x"})), named: snapshotX(nil), want: doFail, reason: "CannotAsk"},
		"a source is not looked up for a driver that called it invalid": {driver: can, claim: from("VolumeSnapshot"), class: testClass(nil),
			progress: progress{infeasible: &infeasible{now.Add(time.Second), "class-1", "1", 1_500_000_000, ""}}, want: doWait, reason: "Infeasible"},
		"data from a snapshot of another group":   {driver: can, claim: from("VolumeSnapshot", func(c *corev1.PersistentVolumeClaim) { c.Spec.DataSource.APIGroup = ptr.To("example.com") }), class: testClass(nil), want: doFail, reason: "CannotAsk"},
		"data from a claim":                       {driver: can, claim: from("PersistentVolumeClaim"), class: testClass(nil), want: doLookUp, reason: "NamesOthers"},
		"data from a claim, a driver that cannot": {driver: func(d *driver) { can(d); d.clones = false }, claim: from("PersistentVolumeClaim"), class: testClass(nil), want: doFail, reason: "CannotAsk"},
		"data from a claim of another group":      {driver: can, claim: from("PersistentVolumeClaim", func(c *corev1.PersistentVolumeClaim) { c.Spec.DataSource.APIGroup = ptr.To("example.com") }), class: testClass(nil), want: doIgnore, reason: "Populator", err: volumerules.ErrPopulator},
		"data from another namespace, the gate is off": {driver: can, claim: testClaim(func(c *corev1.PersistentVolumeClaim) {
			c.Spec.DataSourceRef = &corev1.TypedObjectReference{Kind: "PersistentVolumeClaim", Name: "x", Namespace: ptr.To("b")}
		}), class: testClass(nil), want: doFail, reason: "CannotAsk"},
		"an attributes class":                      {driver: can, claim: attributes("gold"), class: testClass(nil), want: doLookUp, reason: "NamesOthers"},
		"an attributes class, read":                {driver: can, claim: attributes("gold"), class: testClass(nil), named: &found{mutable: map[string]string{"iops": "9"}}, want: doStart, reason: "Wanted"},
		"an attributes class that cannot be used":  {driver: can, claim: attributes("gold"), class: testClass(nil), named: &found{err: errGone}, want: doFail, reason: "CannotAsk", err: errGone},
		"an attributes class, a driver without it": {claim: attributes("gold"), class: testClass(nil), want: doFail, reason: "CannotAsk"},
		"an attributes class, the gate is off":     {driver: func(d *driver) { d.VolumeAttributesClass = false }, claim: attributes("gold"), class: testClass(nil), want: doStart, reason: "Wanted"},
		"an attributes class without a name":       {claim: attributes(""), class: testClass(nil), want: doStart, reason: "Wanted"},
		"a driver that cannot":                     {driver: func(d *driver) { d.createsVolumes = false }, claim: testClaim(nil), class: testClass(nil), want: doFail, reason: "CannotAsk"},

		"called invalid a moment ago":                     {claim: testClaim(nil), class: testClass(nil), progress: progress{infeasible: &infeasible{now.Add(time.Second), "class-1", "1", 1_500_000_000, ""}}, want: doWait, reason: "Infeasible"},
		"called invalid long ago":                         {claim: testClaim(nil), class: testClass(nil), progress: progress{infeasible: &infeasible{now, "class-1", "1", 1_500_000_000, ""}}, want: doStart, reason: "Wanted"},
		"called invalid, and the class is another":        {claim: testClaim(nil), class: testClass(nil), progress: progress{infeasible: &infeasible{now.Add(time.Second), "class-0", "1", 1_500_000_000, ""}}, want: doStart, reason: "Wanted"},
		"called invalid, and the class has changed":       {claim: testClaim(nil), class: testClass(nil), progress: progress{infeasible: &infeasible{now.Add(time.Second), "class-1", "0", 1_500_000_000, ""}}, want: doStart, reason: "Wanted"},
		"called invalid, and the attributes have changed": {driver: can, claim: attributes("gold"), class: testClass(nil), progress: progress{infeasible: &infeasible{now.Add(time.Second), "class-1", "1", 1_500_000_000, ""}}, want: doLookUp, reason: "NamesOthers"},
		"called invalid, and the size has changed":        {claim: testClaim(nil), class: testClass(nil), progress: progress{infeasible: &infeasible{now.Add(time.Second), "class-1", "1", 1, ""}}, want: doStart, reason: "Wanted"},

		"asked for":                                       {claim: testClaim(nil), class: testClass(nil), progress: progress{attempt: testAttempt(nil)}, want: doCreate, reason: "Requested"},
		"asked for, with protection always":               {driver: func(d *driver) { d.ProvisioningProtection = ProtectionAlways }, claim: testClaim(nil), progress: progress{attempt: testAttempt(nil)}, want: doProtect, reason: "BeforeFirstCall"},
		"in doubt":                                        {claim: testClaim(nil), progress: progress{attempt: testAttempt(doubt)}, want: doProtect, reason: "InDoubt"},
		"in doubt, with protection off":                   {driver: func(d *driver) { d.ProvisioningProtection = ProtectionOff }, claim: testClaim(nil), progress: progress{attempt: testAttempt(doubt)}, want: doCreate, reason: "Requested"},
		"in doubt and protected":                          {claim: testClaim(protected), progress: progress{attempt: testAttempt(doubt)}, want: doCreate, reason: "Requested"},
		"in doubt, the claim is gone":                     {progress: progress{attempt: testAttempt(doubt)}, want: doCreate, reason: "Requested"},
		"in doubt, the claim is being deleted":            {claim: testClaim(deleting), progress: progress{attempt: testAttempt(doubt)}, want: doCreate, reason: "Requested"},
		"in doubt, the claim became another driver's":     {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations = nil; protected(c) }), progress: progress{attempt: testAttempt(doubt)}, want: doCreate, reason: "Requested"},
		"in doubt, the class is gone":                     {claim: testClaim(protected), progress: progress{attempt: testAttempt(doubt)}, want: doCreate, reason: "Requested"},
		"in doubt, the claim was bound to something else": {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "x"; protected(c) }), progress: progress{attempt: testAttempt(doubt)}, want: doCreate, reason: "Requested"},
		"a secret to be read":                             {claim: testClaim(nil), progress: progress{attempt: testAttempt(func(a *attempt) { a.plan.Secrets.Provisioner = &corev1.SecretReference{Name: "s"} })}, want: doReadSecrets, reason: "SecretsNeeded"},
		"an empty secret that was read": {claim: testClaim(nil), progress: progress{attempt: testAttempt(func(a *attempt) {
			a.plan.Secrets.Provisioner = &corev1.SecretReference{Name: "s"}
			a.request.Secrets = map[string]string{}
		})}, want: doCreate, reason: "Requested"},
		"made and not saved":                                  {claim: testClaim(nil), progress: progress{attempt: testAttempt(func(a *attempt) { a.volume = ourVolume() })}, want: doSave, reason: "Created"},
		"made and not saved, the claim is gone":               {progress: progress{attempt: testAttempt(func(a *attempt) { a.volume = ourVolume() })}, want: doSave, reason: "Created"},
		"made and of no use":                                  {claim: testClaim(protected), progress: progress{attempt: testAttempt(func(a *attempt) { a.waste, a.doubt = "vol-1", true })}, want: doCleanUp, reason: "Unusable"},
		"saved and still protected":                           {claim: testClaim(protected), class: testClass(nil), progress: progress{saved: true}, want: doUnprotect, reason: "Settled"},
		"bound to its volume and still protected":             {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "pvc-" + uid; protected(c) }), want: doUnprotect, reason: "Settled"},
		"bound to another volume, and in doubt about its own": {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "x"; protected(c) }), class: testClass(nil), want: doStart, reason: "LeftInDoubt"},
		"not asked for yet, and the claim is gone":            {progress: progress{attempt: testAttempt(nil)}, want: doDrop, reason: "NotWantedAnyMore"},
		"not asked for yet, and the claim is being deleted":   {claim: testClaim(deleting), progress: progress{attempt: testAttempt(nil)}, want: doDrop, reason: "NotWantedAnyMore"},
		"not asked for yet, and the claim was bound":          {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "x" }), progress: progress{attempt: testAttempt(nil)}, want: doDrop, reason: "NotWantedAnyMore"},
		"asked for, and an earlier volume is being deleted":   {claim: testClaim(protected), volume: releasedVolume(), progress: progress{attempt: testAttempt(doubt)}, want: doWait, reason: "EarlierVolumeIsDeleted"},
		"asked for, and the claim is gone":                    {progress: progress{attempt: testAttempt(func(a *attempt) { a.asked = true })}, want: doCreate, reason: "Requested"},
		"in doubt, and it cannot be noted":                    {claim: testClaim(nil), progress: progress{attempt: testAttempt(func(a *attempt) { a.doubt, a.unnoted = true, true })}, want: doCreate, reason: "Requested"},
		"a secret is read before the claim is protected": {driver: func(d *driver) { d.ProvisioningProtection = ProtectionAlways }, claim: testClaim(nil),
			progress: progress{attempt: testAttempt(func(a *attempt) { a.plan.Secrets.Provisioner = &corev1.SecretReference{Name: "s"} })}, want: doReadSecrets, reason: "SecretsNeeded"},
		"saved, and the volume has gone":                       {claim: testClaim(nil), class: testClass(nil), progress: progress{saved: true, lost: true}, want: doAskAgain, reason: "VolumeGone"},
		"failed for good and still protected":                  {claim: testClaim(protected), class: testClass(nil), progress: progress{settled: true}, want: doUnprotect, reason: "Settled"},
		"left in doubt by an earlier process":                  {claim: testClaim(protected), class: testClass(nil), want: doStart, reason: "LeftInDoubt"},
		"left in doubt by an earlier process, being deleted":   {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { protected(c); deleting(c) }), class: testClass(nil), want: doStart, reason: "LeftInDoubt"},
		"left in doubt, and the class is gone":                 {claim: testClaim(protected), want: doFail, reason: "ClassGone"},
		"left in doubt, and the class is another driver's now": {claim: testClaim(protected), class: testClass(func(c *storagev1.StorageClass) { c.Provisioner = "other" }), want: doFail, reason: "ClassGone"},
		"left in doubt, with a source":                         {driver: can, claim: from("VolumeSnapshot", protected), class: testClass(nil), want: doLookUp, reason: "LeftInDoubt"},
		"left in doubt, and the source is gone":                {driver: can, claim: from("VolumeSnapshot", protected), class: testClass(nil), named: snapshotX(func(f *found) { f.err = errGone }), want: doFail, reason: "SourceGone", err: errGone},
		"left in doubt, and the source is gone, being deleted": {driver: can, claim: from("VolumeSnapshot", protected, deleting), class: testClass(nil), named: snapshotX(func(f *found) { f.err = errGone }), want: doFail, reason: "SourceGone", err: errGone},
		"left in doubt, and the source is there":               {driver: can, claim: from("VolumeSnapshot", protected), class: testClass(nil), named: snapshotX(nil), want: doGuard, reason: "LeftInDoubt"},
		"left in doubt, and the driver has lost a capability":  {claim: from("VolumeSnapshot", protected), class: testClass(nil), named: snapshotX(nil), want: doGuard, reason: "LeftInDoubt"},
		"left in doubt, and it became another driver's":        {claim: testClaim(func(c *corev1.PersistentVolumeClaim) { protected(c); c.Annotations = nil }), class: testClass(nil), want: doStart, reason: "LeftInDoubt"},
		"in doubt, a populator took over":                      {claim: from("Hello", protected), progress: progress{attempt: testAttempt(doubt)}, want: doCreate, reason: "Requested"},
		"failed for good, and the source is gone":              {driver: can, claim: from("VolumeSnapshot", protected), class: testClass(nil), progress: progress{settled: true}, want: doUnprotect, reason: "Settled"},
		"left in doubt, and its volume was saved after all":    {claim: testClaim(protected), class: testClass(nil), volume: ourVolume(), want: doUnprotect, reason: "Settled"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := testDriver(tt.driver).decide(snapshot{claim: tt.claim, class: tt.class, volume: tt.volume, progress: tt.progress, named: tt.named, known: zones, now: now})
			if got.action != tt.want || got.reason != tt.reason {
				t.Errorf("got %v because %s (%v), want %v because %s", got.action, got.reason, got.err, tt.want, tt.reason)
			}
			if tt.err != nil && !errors.Is(got.err, tt.err) {
				t.Errorf("error %v, want %v", got.err, tt.err)
			}
			switch got.action {
			case doStart:
				if got.attempt == nil || got.attempt.request.GetName() != "pvc-"+uid {
					t.Fatalf("attempt %+v", got.attempt)
				}
				if n := tt.named; n != nil && (got.attempt.source != n.source || got.attempt.request.GetVolumeContentSource() != n.content || fmt.Sprint(got.attempt.request.GetMutableParameters()) != fmt.Sprint(n.mutable)) {
					t.Errorf("attempt %+v does not have what was found, %+v", got.attempt, n)
				}
			case doIgnore, doRetry, doFail, doReschedule:
				if got.err == nil {
					t.Error("no error to tell")
				}
			}
		})
	}
}

func TestDecideVolume(t *testing.T) {
	pv := func(change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
		v := &corev1.PersistentVolume{
			ObjectMeta: metav1.ObjectMeta{Name: "pv", UID: "1", Finalizers: []string{volumeFinalizer}},
			Spec: corev1.PersistentVolumeSpec{PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
				PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "drv.example.com", VolumeHandle: "vol-1"}}},
			Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeReleased},
		}
		if change != nil {
			change(v)
		}
		return v
	}
	phase := func(p corev1.PersistentVolumePhase) func(*corev1.PersistentVolume) {
		return func(v *corev1.PersistentVolume) { v.Status.Phase = p }
	}
	bare := func(v *corev1.PersistentVolume) { v.Finalizers = nil }
	retain := func(v *corev1.PersistentVolume) {
		v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	}
	gone := func(v *corev1.PersistentVolume) { v.DeletionTimestamp = &metav1.Time{Time: now} }
	all := func(changes ...func(*corev1.PersistentVolume)) func(*corev1.PersistentVolume) {
		return func(v *corev1.PersistentVolume) {
			for _, c := range changes {
				c(v)
			}
		}
	}
	attached := []*storagev1.VolumeAttachment{{ObjectMeta: metav1.ObjectMeta{Name: "va"}, Spec: storagev1.VolumeAttachmentSpec{NodeName: "n"}}}
	tests := map[string]struct {
		driver     func(*driver)
		volume     *corev1.PersistentVolume
		attached   []*storagev1.VolumeAttachment
		releasable []string
		removal    removal
		want       volumeAction
		reason     string
		remove     []string // finalizers
	}{
		"gone":                               {want: volumeNothing, reason: "Gone"},
		"released":                           {volume: pv(nil), want: volumeDelete, reason: "Released"},
		"released without finalizer":         {volume: pv(bare), want: volumeDelete, reason: "Released"},
		"released and deleted by somebody":   {volume: pv(gone), want: volumeDelete, reason: "Released"},
		"deleted without our finalizer":      {volume: pv(all(gone, bare)), want: volumeNothing, reason: "NotOurs"},
		"retained":                           {volume: pv(all(retain, bare)), want: volumeNothing, reason: "Retained"},
		"retained with finalizer":            {volume: pv(retain), want: volumeChange, reason: "Retained", remove: []string{volumeFinalizer}},
		"bound with finalizer":               {volume: pv(phase(corev1.VolumeBound)), want: volumeNothing, reason: "InUse"},
		"bound without finalizer":            {volume: pv(all(phase(corev1.VolumeBound), bare)), want: volumeChange, reason: "Unprotected"},
		"bound, deleted, without finalizer":  {volume: pv(all(phase(corev1.VolumeBound), bare, gone)), want: volumeNothing, reason: "NotOurs"},
		"bound and deleted":                  {volume: pv(all(phase(corev1.VolumeBound), gone)), want: volumeNothing, reason: "InUse"},
		"failed":                             {volume: pv(phase(corev1.VolumeFailed)), want: volumeNothing, reason: "InUse"},
		"available":                          {volume: pv(phase(corev1.VolumeAvailable)), want: volumeNothing, reason: "InUse"},
		"no policy counts as Delete":         {volume: pv(func(v *corev1.PersistentVolume) { v.Spec.PersistentVolumeReclaimPolicy = "" }), want: volumeDelete, reason: "Released"},
		"attached":                           {volume: pv(nil), attached: attached, want: volumeWait, reason: "Attached"},
		"attached, a driver without publish": {driver: func(d *driver) { d.publishes = false }, volume: pv(nil), attached: attached, want: volumeDelete, reason: "Released"},
		"source of another driver":           {volume: pv(func(v *corev1.PersistentVolume) { v.Spec.CSI.Driver = "other" }), want: volumeFail, reason: "NotCSI"},
		"no CSI source":                      {volume: pv(func(v *corev1.PersistentVolume) { v.Spec.CSI = nil }), want: volumeFail, reason: "NotCSI"},
		"a driver that cannot delete":        {driver: func(d *driver) { d.createsVolumes = false }, volume: pv(nil), want: volumeFail, reason: "CannotDelete"},
		"deleted at the driver":              {volume: pv(nil), removal: removal{volume: true}, want: volumeChange, reason: "Deleted", remove: []string{volumeFinalizer}},
		"deleted at the driver, with another role's finalizer": {volume: pv(nil), releasable: []string{"other/fin"}, removal: removal{volume: true}, want: volumeChange, reason: "Deleted", remove: []string{volumeFinalizer, "other/fin"}},
		"deleted at the driver, finalizer removed":             {volume: pv(bare), removal: removal{volume: true}, want: volumeRemove, reason: "Deleted"},
		"deleted everywhere but for others' finalizers":        {volume: pv(all(bare, gone)), removal: removal{volume: true}, want: volumeNothing, reason: "OthersKeepIt"},
		"object deleted, cache is late":                        {volume: pv(nil), removal: removal{volume: true, object: true}, want: volumeNothing, reason: "Gone"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := testDriver(tt.driver).decideVolume(volumeSnapshot{volume: tt.volume, attachments: tt.attached, releasable: tt.releasable, removal: tt.removal, now: now})
			if got.action != tt.want || got.reason != tt.reason {
				t.Errorf("got %v because %s (%v), want %v because %s", got.action, got.reason, got.err, tt.want, tt.reason)
			}
			if len(tt.remove) > 0 && len(got.change.RemoveFinalizers) != len(tt.remove) {
				t.Errorf("removes %v, want %v", got.change.RemoveFinalizers, tt.remove)
			}
			// What is not even queued is what there is nothing to do for.
			if tt.volume != nil && tt.removal == (removal{}) && got.action != volumeNothing && !testDriver(tt.driver).concerning(tt.volume) {
				t.Error("it would not have been queued")
			}
		})
	}
}

func TestResume(t *testing.T) {
	zones := world([]string{"zone"}, map[string]string{"zone": "a"}, map[string]string{"zone": "b"})
	d := testDriver(func(d *driver) { d.topology = true })
	claim := testClaim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[storagehelpers.AnnSelectedNode] = "node-1" })
	first := d.decide(snapshot{claim: claim, class: testClass(late), known: zones, now: now})
	if first.action != doStart {
		t.Fatal(first)
	}
	first.attempt.request.Secrets = map[string]string{"password": "hunter2"}
	change, err := first.attempt.protection(d.name)
	if err != nil {
		t.Fatal(err)
	}
	left := claim.DeepCopy()
	change.Apply(left)
	if !isProtected(left) {
		t.Fatal("not protected")
	}
	for _, v := range left.Annotations {
		if len(v) > 500 || strings.Contains(v, "hunter2") {
			t.Errorf("annotation %q", v)
		}
	}
	// Everything that the request was made of has changed or gone, but for claim and class.
	delete(left.Annotations, storagehelpers.AnnSelectedNode)
	nothing := topology.NewAggregate()
	resumed, err := d.resume(left, testClass(late), nil, nothing)
	if err != nil {
		t.Fatal(err)
	}
	first.attempt.request.Secrets = nil
	if resumed.request.String() != first.attempt.request.String() || !resumed.doubt || resumed.plan.SelectedNode != "node-1" {
		t.Errorf("got %v, want %v", resumed.request, first.attempt.request)
	}
	other := testClass(func(c *storagev1.StorageClass) { late(c); c.Parameters = map[string]string{"pool": "stolen"} })
	if _, err := d.resume(left, other, nil, nothing); err == nil || !strings.Contains(err.Error(), claimFinalizer) {
		t.Errorf("with another class: %v", err)
	}
	for _, broken := range []string{"{", `{"topology":3}`, `{"topology":"AAAA"}`, `{"request":"x"}`, ""} {
		left.Annotations[annRequest] = broken
		if _, err := d.resume(left, testClass(late), nil, nothing); err == nil {
			t.Errorf("annotation %q is accepted", broken)
		}
	}
	unprotection.Apply(left)
	if isProtected(left) || left.Annotations[annRequest] != "" {
		t.Errorf("left behind: %v %v", left.Finalizers, left.Annotations)
	}
}

// TestRecordOfManyNodes has a note that fits into an annotation, with a topology per node.
func TestRecordOfManyNodes(t *testing.T) {
	a := testAttempt(nil)
	a.request.AccessibilityRequirements = &csi.TopologyRequirement{}
	for i := range 5000 {
		topology := &csi.Topology{Segments: map[string]string{"topology.example.com/node": fmt.Sprintf("worker-%04d.region.example.com", i)}}
		a.request.AccessibilityRequirements.Requisite = append(a.request.AccessibilityRequirements.Requisite, topology)
	}
	r := a.request.AccessibilityRequirements
	r.Preferred = append(append(r.Preferred, r.Requisite[1234:]...), r.Requisite[:1234]...)
	change, err := a.protection("drv.example.com")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", len(change.SetAnnotations[annRequest]))
	left := testClaim(nil)
	change.Apply(left)
	record, err := recordOf(left)
	if err != nil {
		t.Fatal(err)
	}
	back, err := unpackTopology(record.Topology)
	if err != nil || !proto.Equal(back, r) {
		t.Errorf("it does not come back: %v", err)
	}
	if !kube.HasProvisioningRecord("drv.example.com", left) || kube.HasProvisioningRecord("other", left) {
		t.Error("whose the doubt is")
	}
}

// FuzzResume reads whatever a user may write into the annotation.
func FuzzResume(f *testing.F) {
	f.Add(`{"driver":"drv.example.com","request":"","topology":"eJziYuRKAgQAAP//AmUAvA==","selectedNode":"n"}`)
	f.Fuzz(func(t *testing.T, annotation string) {
		d := testDriver(func(d *driver) { d.topology = true })
		claim := testClaim(func(c *corev1.PersistentVolumeClaim) { protected(c); c.Annotations[annRequest] = annotation })
		a, err := d.resume(claim, testClass(nil), nil, topology.NewAggregate())
		if err == nil && (a.request.GetName() != "pvc-"+uid || len(a.request.GetParameters()) > 0) {
			t.Errorf("%q gives %v", annotation, a.request)
		}
	})
}
