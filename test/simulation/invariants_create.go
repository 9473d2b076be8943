// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/csiclient/csitest"
	"github.com/storage-controller/storage-controller/provisioner"
	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// createChecker holds what the invariants of CreateVolume need to know about the past, by the names of the volumes.
type createChecker struct {
	requests      map[string]*csi.CreateVolumeRequest // the last one for a volume that may exist
	creator       map[string]*replica                 // the last that has requested it
	indeterminate map[string]*replica                 // does not know the outcome, and has not tried to protect the claim since
	lost          map[string]bool                     // volumes whose creator could not record the request
	sources       map[string]copySource
	renewed       map[*replica]time.Time // when it has last received that it holds the Lease
}

func newCreateChecker() createChecker {
	return createChecker{
		map[string]*csi.CreateVolumeRequest{}, map[string]*replica{}, map[string]*replica{}, map[string]bool{}, map[string]copySource{},
		map[*replica]time.Time{},
	}
}

// claimNamed returns the claim of the volume with that name, or nil.
func (s *simulation) claimNamed(volume string) *corev1.PersistentVolumeClaim {
	for _, claim := range cluster.List[*corev1.PersistentVolumeClaim](s.api, cluster.Claims) {
		if "pvc-"+string(claim.UID) == volume {
			return claim
		}
	}
	return nil
}

// unprotected reports whether the claim of a volume lacks the provisioning finalizer, so that the next leader does not know of
// its request.
func (s *simulation) unprotected(volume string) bool {
	claim := s.claimNamed(volume)
	return claim == nil || !slices.Contains(claim.Finalizers, cluster.ProvisioningFinalizer)
}

// loses records which volumes the next leader does not know if r cannot write any more: with
// --provisioning-protection=on-retry, the claim is not protected during the first call, and with off never.
func (s *simulation) loses(r *replica) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.cutOff = true
	s.forgets(r)
}

// forgets records that r does not continue its unrecorded requests. The lock must be held.
func (s *simulation) forgets(r *replica) {
	c := s.checker.creates
	for name, creator := range c.creator {
		unrecorded := s.scale.protection != "always" && s.unprotected(name) || s.lacksRecord(s.claimNamed(name))
		if creator == r && unrecorded {
			c.lost[name] = true
			delete(c.requests, name)
			delete(c.indeterminate, name)
		}
	}
}

// reconnected records that a partition of r has ended.
func (s *simulation) reconnected(r *replica) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.partitioned, r.cutOff = 0, r.stopping
	r.unreachable.Store(false)
}

// observeTerm records whether a write of a Lease, which holder held before, begins a term of the provisioner. It returns a
// function that records when its response arrives.
func (s *simulation) observeTerm(from *replica, name, holder string) (received func()) {
	if name != provisioner.LeaseName(s.scale.driver()) {
		return nothing
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	renewed := s.checker.creates.renewed
	for _, r := range s.processes {
		if at, ok := renewed[r]; ok && (r == from && time.Since(at) >= renewDeadline || r != from && r.name == holder) {
			s.forgets(r)
		}
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		renewed[from] = time.Now()
	}
}

// tried records that a replica has tried to protect a claim.
func (s *simulation) tried(from *replica, r apiserver.Request) {
	if r.Resource != cluster.Claims || r.Verb != "patch" || !strings.Contains(string(r.Body), cluster.ProvisioningFinalizer) {
		return
	}
	claim, _ := s.api.Get(cluster.Claims, r.Namespace, r.Name).(*corev1.PersistentVolumeClaim)
	if claim == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if name := "pvc-" + string(claim.UID); s.checker.creates.indeterminate[name] == from {
		delete(s.checker.creates.indeterminate, name)
	}
}

// answered records whether a replica knows the outcome of a call.
func (c createChecker) answered(to *replica, r *csi.CreateVolumeRequest, unknown bool) {
	if unknown {
		c.indeterminate[r.GetName()] = to
	} else {
		delete(c.indeterminate, r.GetName())
	}
}

// mayCreate returns an error if another request may have created the volume, or if the replica repeats a call without having
// protected the claim. With --provisioning-protection=on-retry, a process that was killed during the first call does not tell
// its successor about it.
func (s *simulation) mayCreate(from *replica, r *csi.CreateVolumeRequest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, name, claim := s.checker.creates, r.GetName(), s.claimNamed(r.GetName())
	last, creator := c.requests[name], c.creator[name]
	if creator != from && last != nil && s.unprotected(name) || from.cutOff {
		c.lost[name] = c.lost[name] || s.scale.protection != "always"
	}
	if creator != from && last != nil && s.lacksRecord(claim) {
		c.lost[name] = true
	}
	if last != nil && !proto.Equal(last, r) && !(c.lost[name] && creator != from) {
		return fmt.Errorf("the outcome of another request is unknown: %v, now %v", last, r)
	}
	exists := claim != nil && claim.DeletionTimestamp == nil
	if s.scale.protection != "off" && c.indeterminate[name] == from && exists && s.unprotected(name) {
		return errors.New("the outcome of the last call is unknown, and its claim is not protected")
	}
	unbound := claim != nil && claim.DeletionTimestamp == nil && claim.Spec.VolumeName == ""
	if unbound && s.scale.protection == "always" && s.unprotected(name) {
		return errors.New("its claim is not protected")
	}
	c.requests[name], c.creator[name] = r, from
	return s.sourceProtected(r)
}

// mayConflict reports whether the volume of a claim may have been requested with other parameters than its class has.
func (s *simulation) mayConflict(claim *corev1.PersistentVolumeClaim) bool {
	return slices.Contains(claim.Finalizers, cluster.ProvisioningFinalizer) || s.checker.creates.lost["pvc-"+string(claim.UID)]
}

// mayLeak reports whether v may have no PersistentVolume: its creator was lost, and its claim was deleted, or waits for
// another node.
func (s *simulation) mayLeak(v csitest.Volume) bool {
	claim := s.claimNamed(v.Name)
	return s.checker.creates.lost[v.Name] && s.checker.volumes[v.ID] == nil && (claim == nil || claim.DeletionTimestamp != nil ||
		s.scale.features.Topology && claim.Annotations[storagehelpers.AnnSelectedNode] == "")
}

// copySource is what a volume is copied from.
type copySource struct {
	resource  schema.GroupVersionResource
	name      string
	uid       types.UID
	finalizer string
}

// sourceProtected returns an error unless the source of a copy has the finalizer. The first call decides which one that is:
// the claim may be deleted later. The lock must be held.
func (s *simulation) sourceProtected(r *csi.CreateVolumeRequest) error {
	source, known := s.checker.creates.sources[r.GetName()]
	if claim := s.claimNamed(r.GetName()); !known && claim != nil && claim.Spec.DataSource != nil {
		source = copySource{resource: cluster.Claims, name: claim.Spec.DataSource.Name, finalizer: cluster.CloneFinalizer}
		if claim.Spec.DataSource.Kind == "VolumeSnapshot" {
			source.resource, source.finalizer = cluster.Snapshots, cluster.RestoreFinalizer
		}
		if obj, _ := s.api.Get(source.resource, cluster.Namespace, source.name).(metav1.Object); obj != nil {
			source.uid = obj.GetUID()
		}
		s.checker.creates.sources[r.GetName()] = source
	}
	if source.name == "" {
		return nil
	}
	obj, _ := s.api.Get(source.resource, cluster.Namespace, source.name).(metav1.Object)
	if obj == nil || obj.GetUID() != source.uid || !slices.Contains(obj.GetFinalizers(), source.finalizer) {
		return fmt.Errorf("%s %s lacks the finalizer %s", source.resource.Resource, source.name, source.finalizer)
	}
	return nil
}

// executes checks that the source of a copy is still protected when the driver executes a call whose client waits for it.
func (s *simulation) executes(from *replica, r any) {
	create, ok := r.(*csi.CreateVolumeRequest)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.sourceProtected(create); err != nil {
		s.violatedLocked("%s calls CreateVolume %s: meanwhile, %v", from.client, create.GetName(), err)
	}
}
