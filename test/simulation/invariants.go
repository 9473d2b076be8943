// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/attacher"
	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/provisioner"
	"github.com/storage-controller/storage-controller/resizer"
	"github.com/storage-controller/storage-controller/snapshotter"
	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// checker holds what invariants need to know about the past.
type checker struct {
	version uint64 // of the last check
	read    reads[*corev1.PersistentVolume]
	volumes map[string]*corev1.PersistentVolume // the last state of all that have ever existed, by handle
	renewed map[string]time.Time                // the last write of each Lease
	foreign map[types.UID]protection            // the finalizers of other components
	// writes and calls are the numbers of the API requests that write something else than a Lease, and of the calls that
	// change something at the driver.
	writes, calls atomic.Int64
	refusals      atomic.Int64         // of a throttle, or for lack of a permission: each causes another attempt
	refused       map[string]time.Time // the last refusal of each CreateVolume by the service of TopoLVM
	// released are the volumes that a replica has begun to release.
	released map[string]bool
	creates  createChecker
	resizer  resizeChecker
	taken    snapshotChecker
	nodes    nodeChecker
	topolvm  topolvmChecker
}

// protection is the finalizers of other components on an object.
type protection struct {
	name       string
	finalizers []string
}

func newChecker() *checker {
	return &checker{
		refused: map[string]time.Time{}, read: newReads[*corev1.PersistentVolume](), volumes: map[string]*corev1.PersistentVolume{},
		renewed: map[string]time.Time{}, foreign: map[types.UID]protection{},
		released: map[string]bool{},
		creates:  newCreateChecker(), resizer: newResizeChecker(), taken: newSnapshotChecker(), nodes: newNodeChecker(),
		topolvm: newTopolvmChecker(),
	}
}

// retained reports whether the volume may be left behind: users have set the policy Retain, perhaps while
// it was being deleted.
func (c *checker) retained(handle string) bool {
	pv := c.volumes[handle]
	return pv != nil && pv.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRetain
}

// nothing records nothing, for a response that no invariant needs.
func nothing() {}

// observe returns a function that records what r has changed and read, once it is executed.
func (s *simulation) observe(from *replica, r apiserver.Request) func(apiserver.Result) (received func()) {
	holder := ""
	if isLease(r) {
		if lease := s.lease(r.Name); lease != nil {
			holder = ptr.Deref(lease.Spec.HolderIdentity, "")
		}
	}
	node := s.cluster.Node(r.Name)
	s.deletesLogicalVolume(from, r)
	return func(result apiserver.Result) func() {
		now := time.Now()
		succeeded, notFound := result.Code < http.StatusMultipleChoices, result.Code == http.StatusNotFound
		if !isLease(r) && r.Verb != "get" && r.Verb != "list" {
			s.checker.writes.Add(1)
		}
		switch {
		case isLease(r) && r.Verb == "create" && succeeded: // its own time is older, after a late response to a read
			s.mu.Lock()
			s.checker.renewed[result.Object.(metav1.Object).GetName()] = time.Now()
			s.mu.Unlock()
		case isLease(r) && r.Verb == "update" && succeeded:
			s.mu.Lock()
			s.checker.renewed[r.Name] = time.Now()
			s.mu.Unlock()
			return s.observeTerm(from, r.Name, holder)
		case isOf("nodecontroller", r) && (r.Verb == "get" || r.Verb == "list") && (succeeded || notFound):
			return s.nodeControllerReads(from, r, result)
		case isOf("nodecontroller", r) && r.Resource == cluster.Nodes && r.Verb == "patch" && succeeded:
			s.releasedNode(from, node)
		case isOf("nodecontroller", r) && succeeded:
			s.forces(r, result)
		case isOf("snapshotter", r) && r.Resource == cluster.Contents && (r.Verb == "get" || r.Verb == "patch") && succeeded:
			content := cluster.TypedOf[snapshotv1.VolumeSnapshotContent](s.cluster, result.Object)
			return func() { s.readContent(from, r.Name, content, now) }
		case isOf("provisioner", r) && r.Resource == cluster.Volumes && r.Verb == "get" && (succeeded || notFound):
			pv, _ := result.Object.(*corev1.PersistentVolume)
			return func() {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.checker.read.received(from, r.Name, pv, now)
			}
		}
		return nothing
	}
}

// mayRequest checks a request that a replica sends: a deletion must name the UID of the object, a Secret is only read by its
// name, and only the holder of the Lease publishes capacities.
func (s *simulation) mayRequest(from *replica, r apiserver.Request) {
	var err error
	reads := r.Verb == "get" || r.Verb == "list" || r.Verb == "watch"
	switch {
	case r.Resource.Resource == "secrets" && r.Verb != "get":
		err = errors.New("a Secret may only be read by its name")
	case r.Verb == "delete" && r.Preconditions().UID == nil:
		err = errors.New("it has no precondition for the UID")
	case r.Verb == "deletecollection":
		err = errors.New("it deletes several objects")
	case r.Resource == cluster.Capacities && !reads:
		err = s.leads(from, provisioner.LeaseName(s.scale.driver()))
	}
	if err != nil {
		s.violated("%s %s: %v", from.client, describe(r), err)
	}
}

// began checks the invariants of a call when the replica makes it, and returns the Lease that the replica must hold.
func (s *simulation) began(from *replica, method string, r any) (lease string) {
	lease = provisioner.LeaseName(s.scale.driver())
	var err error
	switch r := r.(type) {
	case *csi.DeleteVolumeRequest:
		err = s.mayDelete(from, r.GetVolumeId())
	case *csi.ControllerPublishVolumeRequest:
		lease, err = attacher.LeaseName(s.scale.driver()), s.mayPublish(r)
	case *csi.ControllerUnpublishVolumeRequest:
		lease, err = attacher.LeaseName(s.scale.driver()), s.mayUnpublish(from, r)
	case *csi.ControllerExpandVolumeRequest:
		lease, err = resizer.LeaseName(s.scale.driver()), s.mayExpand(r)
	case *csi.ControllerModifyVolumeRequest:
		lease, err = resizer.LeaseName(s.scale.driver()), s.mayModify(r)
	case *csi.CreateSnapshotRequest:
		lease, err = snapshotter.LeaseName(s.scale.driver()), s.mayCreateSnapshot(r)
	case *csi.DeleteSnapshotRequest:
		lease, err = snapshotter.LeaseName(s.scale.driver()), s.mayDeleteSnapshot(from, r)
	case *csi.CreateVolumeRequest:
		err = s.mayCreate(from, r)
	default:
		return ""
	}
	if err == nil {
		err = s.leads(from, lease)
	}
	if err == nil {
		err = s.hasCredentials(r)
	}
	if err != nil {
		s.violated("%s calls %s %s: %v", from.client, method, volumeOf(r), err)
	}
	return lease
}

// hasCredentials returns an error if the request r lacks the values of the Secret that all classes name. DeleteVolume is
// called without them if there is no Secret, or no permission to read it.
func (s *simulation) hasCredentials(r any) error {
	request, ok := r.(interface{ GetSecrets() map[string]string })
	if _, deletes := r.(*csi.DeleteVolumeRequest); deletes && request.GetSecrets() == nil && (s.cluster.SecretDeleted || s.secretsDenied) {
		return nil
	}
	if ok && s.scale.features.Secrets && !maps.Equal(request.GetSecrets(), cluster.Credentials) {
		return fmt.Errorf("with the values %q of the Secret, not %q", request.GetSecrets(), cluster.Credentials)
	}
	return nil
}

func (s *simulation) lease(name string) *coordinationv1.Lease {
	leases := coordinationv1.SchemeGroupVersion.WithResource("leases")
	lease, _ := s.api.Get(leases, metav1.NamespaceSystem, name).(*coordinationv1.Lease)
	return lease
}

// leads returns an error unless the replica holds the Lease, and no other may acquire it.
func (s *simulation) leads(from *replica, name string) error {
	lease := s.lease(name)
	switch {
	case lease == nil || lease.Spec.HolderIdentity == nil:
		return fmt.Errorf("there is no Lease %s", name)
	case *lease.Spec.HolderIdentity != from.name:
		return fmt.Errorf("the Lease %s is held by %q", name, *lease.Spec.HolderIdentity)
	}
	s.mu.Lock()
	renewed, ok := s.checker.renewed[name]
	s.mu.Unlock()
	if !ok {
		renewed = lease.Spec.RenewTime.Time // of the creation, by the clock of the replica
	}
	age, duration := time.Since(renewed), time.Duration(*lease.Spec.LeaseDurationSeconds)*time.Second
	if age >= duration {
		return fmt.Errorf("the Lease %s was last renewed %v ago, and another replica may acquire it after %v", name, age, duration)
	}
	return nil
}

// volumesWith returns the PersistentVolumes of a volume of the driver.
func (s *simulation) volumesWith(handle string) []*corev1.PersistentVolume {
	return slices.DeleteFunc(cluster.List[*corev1.PersistentVolume](s.api, cluster.Volumes), func(pv *corev1.PersistentVolume) bool {
		return pv.Spec.CSI == nil || pv.Spec.CSI.VolumeHandle != handle
	})
}

// answered records the response to a call.
func (s *simulation) answered(to *replica, r any, err error) {
	unknown := err != nil && csiclient.OutcomeOf(err) == csiclient.Indeterminate
	s.mu.Lock()
	defer s.mu.Unlock()
	if create, ok := r.(*csi.CreateVolumeRequest); ok {
		s.checker.creates.answered(to, create, unknown)
	}
	if unknown {
		return
	}
	switch r := r.(type) {
	case *csi.CreateSnapshotRequest:
		if err != nil { // after a definite error, a changed class changes the request
			delete(s.checker.taken.requests, contentOf(r.GetName()))
		}
	case *csi.CreateVolumeRequest:
		if err != nil {
			delete(s.checker.creates.requests, r.GetName())
		}
	case *csi.DeleteVolumeRequest:
		if pv := s.checker.volumes[r.GetVolumeId()]; pv != nil && err == nil {
			delete(s.checker.creates.requests, pv.Name)
		}
	case *csi.ControllerExpandVolumeRequest:
		call := s.checker.resizer.expansions[r.GetVolumeId()]
		if call != nil && call.to == bytes(r.GetCapacityRange().GetRequiredBytes()) {
			call.settled = to
		}
	case *csi.ControllerModifyVolumeRequest:
		call := s.checker.resizer.modifications[r.GetVolumeId()]
		if call != nil && maps.Equal(s.attributes(call.to), r.GetMutableParameters()) {
			call.settled = to
		}
	}
}

// mayDelete returns an error unless the replica has read from the API server since its last call that the volume is released
// and to be deleted, or that it has no PersistentVolume. If its watch has not shown the VolumeAttachment of a published volume,
// the driver refuses.
func (s *simulation) mayDelete(from *replica, handle string) error {
	var attachments []*storagev1.VolumeAttachment
	var name string // of the volume; empty if it does not exist
	for _, v := range s.volumes() {
		if v.ID != handle {
			continue
		}
		name = v.Name
		for _, node := range slices.Sorted(maps.Keys(v.Published)) {
			va := s.attachment(handle, node)
			if va == nil {
				return fmt.Errorf("it is published without a VolumeAttachment")
			}
			attachments = append(attachments, va)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, va := range attachments {
		if from.attachments[va.UID] {
			return fmt.Errorf("it is published by %s", va.Name)
		}
	}
	if s.checker.volumes[handle] == nil { // CreateVolume returned it while the claim had another volume
		if pv, ok := s.checker.read.live[from][name]; !ok || pv != nil && pv.Spec.CSI.VolumeHandle == handle {
			return fmt.Errorf("PersistentVolume %s was not read, so it may name this volume", name)
		}
		return s.checker.read.use(from, name)
	}
	live := s.checker.read.live[from]
	for _, name := range slices.Sorted(maps.Keys(live)) {
		pv := live[name]
		if pv == nil || pv.Spec.CSI.VolumeHandle != handle {
			continue
		}
		switch {
		case pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete:
			return fmt.Errorf("PersistentVolume %s has the policy %s", pv.Name, pv.Spec.PersistentVolumeReclaimPolicy)
		case pv.Status.Phase != corev1.VolumeReleased:
			return fmt.Errorf("PersistentVolume %s is %s", pv.Name, pv.Status.Phase)
		}
		return s.checker.read.use(from, pv.Name)
	}
	return fmt.Errorf("it has not read a PersistentVolume with this volume")
}

func (s *simulation) attachment(handle, nodeID string) *storagev1.VolumeAttachment {
	for _, va := range cluster.List[*storagev1.VolumeAttachment](s.api, cluster.Attachments) {
		for _, pv := range s.volumesWith(handle) {
			if *va.Spec.Source.PersistentVolumeName == pv.Name && "id-of-"+va.Spec.NodeName == nodeID {
				return va
			}
		}
	}
	return nil
}

// mayPublish returns an error unless a VolumeAttachment and a PersistentVolume record the publication. After DeleteVolume, the
// provisioner removes the finalizer, and the driver publishes nothing.
func (s *simulation) mayPublish(r *csi.ControllerPublishVolumeRequest) error {
	va, finalizer := s.attachment(r.GetVolumeId(), r.GetNodeId()), attacher.Finalizer(s.scale.driver())
	exists := func(v csitest.Volume) bool { return v.ID == r.GetVolumeId() }
	switch {
	case !slices.ContainsFunc(s.volumes(), exists):
		return nil
	case va == nil:
		return fmt.Errorf("there is no VolumeAttachment")
	case !slices.Contains(va.Finalizers, finalizer):
		return fmt.Errorf("VolumeAttachment %s lacks the finalizer", va.Name)
	}
	for _, pv := range s.volumesWith(r.GetVolumeId()) {
		if !slices.Contains(pv.Finalizers, finalizer) {
			return fmt.Errorf("PersistentVolume %s lacks the finalizer", pv.Name)
		}
	}
	return nil
}

// mayUnpublish returns an error if a VolumeAttachment requests the publication. The volume is not published yet for one that has
// no finalizer and that the watch of the replica has not shown.
func (s *simulation) mayUnpublish(from *replica, r *csi.ControllerUnpublishVolumeRequest) error {
	va := s.attachment(r.GetVolumeId(), r.GetNodeId())
	if va == nil || va.DeletionTimestamp != nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if from.attachments[va.UID] || slices.Contains(va.Finalizers, attacher.Finalizer(s.scale.driver())) {
		return fmt.Errorf("VolumeAttachment %s is not being deleted", va.Name)
	}
	return nil
}

// releases checks a patch of the attacher, which can only remove its finalizer if its watch has shown that the volume has it and
// is being deleted.
func (s *simulation) releases(from *replica, r apiserver.Request) {
	if !isOf("attacher", r) || r.Resource != cluster.Volumes || r.Verb != "patch" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	pv := s.checker.read.watched[from][r.Name]
	if pv == nil || pv.DeletionTimestamp == nil || !slices.Contains(pv.Finalizers, attacher.Finalizer(s.scale.driver())) {
		return
	}
	if s.checker.released[from.client+" "+r.Name] { // a retry of that patch, which no VolumeAttachment forbade
		return
	}
	s.checker.released[from.client+" "+r.Name] = true
	for _, va := range cluster.List[*storagev1.VolumeAttachment](s.api, cluster.Attachments) {
		if from.attachments[va.UID] && *va.Spec.Source.PersistentVolumeName == r.Name {
			s.violatedLocked("%s releases volume %s, which %s names", from.client, r.Name, va.Name)
		}
	}
}

// check checks the invariants of every state.
func (s *simulation) check() {
	defer func() { s.componentActed = false }()
	if s.checker.version == s.api.Version() {
		return
	}
	s.checker.version = s.api.Version()
	volumes := map[types.UID]string{}
	for _, pv := range cluster.List[*corev1.PersistentVolume](s.api, cluster.Volumes) {
		s.checker.volumes[pv.Spec.CSI.VolumeHandle] = pv
		if ref := pv.Spec.ClaimRef; ref != nil {
			if other, ok := volumes[ref.UID]; ok {
				s.violated("claim %s has two volumes: %s and %s", ref.Name, other, pv.Name)
			}
			volumes[ref.UID] = pv.Name
		}
	}
	for _, claim := range cluster.List[*corev1.PersistentVolumeClaim](s.api, cluster.Claims) {
		if claim.Status.Phase == corev1.ClaimLost {
			s.violated("claim %s lost its volume", claim.Name)
		}
	}
	s.checkTerms()
	s.checkFinalizers()
	s.checkSizes()
	s.checkNodes()
	s.checkSnapshots()
	s.checkTopolvm()
}

// checkTerms checks that a process has canceled its calls before another one can acquire the Lease. Those that a suspended process has
// begun before are canceled when it continues.
func (s *simulation) checkTerms() {
	for _, o := range append(s.gate.running(), s.stillServing()...) {
		if o.excused || o.replica.isSuspended(s.step) {
			continue
		}
		if err := s.leads(o.replica, o.term); err != nil {
			s.violated("%s still calls %s: %v", o.replica.client, o.name, err)
		}
	}
}

// checkFinalizers checks that only the components remove their finalizers. An object that vanishes had none of them.
func (s *simulation) checkFinalizers() {
	now := map[types.UID]protection{}
	for _, resource := range []schema.GroupVersionResource{cluster.Volumes, cluster.Claims, cluster.Snapshots} {
		for _, obj := range cluster.List[runtime.Object](s.api, resource) {
			o := obj.(metav1.Object)
			lacks := func(f string) bool { return !slices.Contains(o.GetFinalizers(), f) }
			if foreign := slices.DeleteFunc(slices.Clone(cluster.Finalizers), lacks); len(foreign) > 0 {
				now[o.GetUID()] = protection{o.GetName(), foreign}
			}
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(s.checker.foreign)) {
		for _, f := range s.checker.foreign[uid].finalizers {
			if !slices.Contains(now[uid].finalizers, f) && !s.componentActed {
				s.violated("%s lost the finalizer %s", s.checker.foreign[uid].name, f)
			}
		}
	}
	s.checker.foreign = now
}

// checkEffort checks that each step of a component or a user, each fault and each start of a process leads to at most two
// writes and one call, on average.
func (s *simulation) checkEffort() {
	causes := int64(s.performed+s.history.Faults+s.started) + s.checker.refusals.Load()
	if writes, limit := s.checker.writes.Load(), 10+2*causes; writes > limit {
		s.violated("%d writes, more than %d", writes, limit)
	}
	if calls, limit := s.checker.calls.Load(), 10+causes; calls > limit {
		s.violated("%d calls of the driver, more than %d", calls, limit)
	}
}

// deletedVolumes returns the volumes that the driver has deleted and whose PersistentVolumes exist.
func (s *simulation) deletedVolumes() []string {
	exists := map[string]bool{}
	for _, v := range s.volumes() {
		exists[v.ID] = true
	}
	var deleted []string
	for _, pv := range cluster.List[*corev1.PersistentVolume](s.api, cluster.Volumes) {
		if handle := pv.Spec.CSI.VolumeHandle; !exists[handle] && !s.checker.retained(handle) && !s.unreachable(handle) {
			deleted = append(deleted, "volume "+handle+" does not exist, but PersistentVolume "+pv.Name+" does")
		}
	}
	return deleted
}

// checkRest checks that the driver has what the objects say.
func (s *simulation) checkRest(when string) {
	s.checkEffort()
	s.checkModified(when)
	s.checkTopolvmAtRest(when)
	s.checkSnapshotsAtRest(when)
	recorded := map[string]bool{}
	for _, pv := range cluster.List[*corev1.PersistentVolume](s.api, cluster.Volumes) {
		for _, va := range cluster.List[*storagev1.VolumeAttachment](s.api, cluster.Attachments) {
			if publication := pv.Spec.CSI.VolumeHandle + " id-of-" + va.Spec.NodeName; *va.Spec.Source.PersistentVolumeName == pv.Name {
				recorded[publication] = slices.Contains(va.Finalizers, attacher.Finalizer(s.scale.driver()))
			}
		}
	}
	for _, v := range s.volumes() {
		kept := s.checker.retained(v.ID) || s.checker.nodes.forced[v.ID] || s.mayLeak(v) || s.waitsForNode(v)
		if len(s.volumesWith(v.ID)) == 0 && !kept {
			s.violated("%s: volume %s (%s) has no PersistentVolume", when, v.ID, v.Name)
		}
		if len(v.Published) > 1 {
			s.happens("a volume is published to two nodes")
		}
		for _, node := range slices.Sorted(maps.Keys(v.Published)) {
			if !recorded[v.ID+" "+node] {
				s.violated("%s: volume %s is published to %s, and its VolumeAttachment is missing or lacks the finalizer", when, v.ID, node)
			}
		}
	}
	for _, p := range s.unattached() {
		s.violated("%s: %s is not published, but attached", when, p)
	}
}
