// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"bytes"
	"compress/zlib"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// requestRecord holds what the next leader needs to repeat a request. It is stored in an annotation of the claim.
// Users who may write the claim can write the annotation. Except for ID, it therefore contains only what claim and class say:
// the request is prepared from them again, with the topology of the record, and must have the same hash, see [driver.resume].
type requestRecord struct {
	ID     string `json:"id"`     // tells the records of a claim apart
	Driver string `json:"driver"` // as kube.RecordedDriver reads it
	// Request is a hash of the request without the values of its secrets.
	Request string `json:"request"`
	// Topology is a compressed csi.TopologyRequirement, which is large with one segment per node. Nil for none. The preferred segments
	// are the requisite ones, rotated: the one with index First comes first.
	Topology []byte `json:"topology,omitempty"`
	First    int    `json:"first,omitempty"`
	// Recompute: the topology is too large for an annotation, and is not in Request. It is computed from the nodes again.
	Recompute    bool   `json:"recompute,omitempty"`
	SelectedNode string `json:"selectedNode,omitempty"`
	// Secret is the provisioner secret, empty without one.
	Secret corev1.SecretReference `json:"secret"`
}

const (
	// maxPacked bounds the compressed topology. In base64, it leaves 8 KiB of the annotation for the rest of the record.
	maxPacked = (kube.MaxProvisioningRequest - 8<<10) / 4 * 3
	// maxTopology bounds the encoding of a topology, also in an annotation that any user may write. It is the default limit of
	// gRPC for a request.
	maxTopology = 4 << 20
	// maxTopologies bounds the segments in it.
	maxTopologies = 100_000
)

// resuming bounds the memory for the topologies in annotations: an entry of a few bytes takes a hundred when it is decoded.
var resuming sync.Mutex

// pack encodes t, which is not nil. It reports whether that fits into an annotation.
func (r *requestRecord) pack(t *csi.TopologyRequirement) (fits bool, err error) {
	r.First = slices.IndexFunc(t.GetRequisite(), func(s *csi.Topology) bool { return proto.Equal(s, t.GetPreferred()[0]) })
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(&csi.TopologyRequirement{Requisite: t.GetRequisite()})
	if err != nil {
		return false, fmt.Errorf("encoding the topology: %w", err)
	}
	var packed bytes.Buffer
	w := zlib.NewWriter(&packed)
	if _, err = w.Write(data); err == nil {
		err = w.Close()
	}
	r.Topology = packed.Bytes()
	fits = len(data) <= maxTopology && len(t.GetRequisite()) <= maxTopologies && packed.Len() <= maxPacked
	return fits, err // a buffer takes everything: err is nil
}

// unpack decodes the topology of a record.
func (r *requestRecord) unpack() (*csi.TopologyRequirement, error) {
	t, err := unpackTopology(r.Topology)
	if err != nil {
		return nil, err
	}
	if r.First < 0 || r.First >= len(t.GetRequisite()) {
		return nil, fmt.Errorf("the topology has %d segments, and none with index %d", len(t.GetRequisite()), r.First)
	}
	t.Preferred = slices.Concat(t.GetRequisite()[r.First:], t.GetRequisite()[:r.First])
	return t, nil
}

// unpackTopology decodes a compressed topology.
func unpackTopology(packed []byte) (*csi.TopologyRequirement, error) {
	r, err := zlib.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(r, maxTopology+1))
	switch {
	case err != nil:
		return nil, err
	case len(data) > maxTopology:
		return nil, fmt.Errorf("the topology has more than %d bytes", maxTopology)
	}
	for rest, n := data, 0; len(rest) > 0; n++ {
		_, _, size := protowire.ConsumeField(rest)
		if size < 0 || n == maxTopologies {
			return nil, fmt.Errorf("the topology is malformed, or has more than %d segments", maxTopologies)
		}
		rest = rest[size:]
	}
	t := &csi.TopologyRequirement{}
	return t, proto.Unmarshal(data, t)
}

// fingerprint returns a hash of a request without the values of its secrets and, if recompute is set, without its topology.
func fingerprint(request *csi.CreateVolumeRequest, recompute bool) (string, error) {
	bare := proto.CloneOf(request)
	bare.Secrets = nil
	if recompute {
		bare.AccessibilityRequirements = nil
	}
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(bare)
	if err != nil {
		return "", fmt.Errorf("encoding the request: %w", err)
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:]), nil
}

// protection returns the change that keeps claim until the outcome of the request of o is known. id identifies the record. It fails if
// claim is outdated and another process has protected it.
func (o operation) protection(driver, id string, claim *corev1.PersistentVolumeClaim) (kube.MetadataPatch, error) {
	r := requestRecord{ID: id, Driver: driver, SelectedNode: o.plan.SelectedNode}
	r.Secret = ptr.Deref(o.plan.Secrets.Provisioner, corev1.SecretReference{})
	var err error
	if t := o.request.GetAccessibilityRequirements(); t != nil {
		fits, err := r.pack(t)
		if err != nil {
			return kube.MetadataPatch{}, err
		}
		if !fits {
			r.Topology, r.First, r.Recompute = nil, 0, true
		}
	}
	if r.Request, err = fingerprint(o.request, r.Recompute); err != nil {
		return kube.MetadataPatch{}, err
	}
	data, err := json.Marshal(r)
	if err != nil {
		return kube.MetadataPatch{}, fmt.Errorf("encoding the record of the request: %w", err)
	}
	tests := sameRecord(claim)
	tests[kube.AnnotationPath(storagehelpers.AnnSelectedNode)] = nil // after a rescheduling, the request is another one
	if node, selected := claim.Annotations[storagehelpers.AnnSelectedNode]; selected {
		tests[kube.AnnotationPath(storagehelpers.AnnSelectedNode)] = node
	}
	tests["/metadata/finalizers"] = nil
	if len(claim.Finalizers) > 0 {
		tests["/metadata/finalizers"] = claim.Finalizers
	}
	return kube.MetadataPatch{
		AddFinalizers:  []string{kube.ProvisioningFinalizer},
		SetAnnotations: map[string]string{kube.AnnProvisioningRequest: string(data)},
		Tests:          tests,
	}, nil
}

// unprotection returns the change that undoes protection. It fails if claim is outdated and has another record.
func unprotection(claim *corev1.PersistentVolumeClaim) kube.MetadataPatch {
	return kube.MetadataPatch{
		RemoveFinalizers: []string{kube.ProvisioningFinalizer}, RemoveAnnotations: []string{kube.AnnProvisioningRequest},
		Tests: sameRecord(claim),
	}
}

// sameRecord returns a test for the record on claim.
func sameRecord(claim *corev1.PersistentVolumeClaim) map[string]any {
	var have any
	if text, recorded := claim.Annotations[kube.AnnProvisioningRequest]; recorded {
		have = text
	}
	return map[string]any{kube.AnnotationPath(kube.AnnProvisioningRequest): have}
}

// recordOn returns the record that claim has of its CreateVolume. Without a call in progress, the record is its own if a
// PersistentVolume exists, or if the last call had the request of that record. A late record of an ended request says nothing about
// the call in progress, and is its own to remove without one.
func (d driver) recordOn(claim *corev1.PersistentVolumeClaim, hasVolume bool, c call) intent.Recorded {
	if claim == nil || !isProtected(claim) {
		return intent.None
	}
	id, resumed, own := recordIDOf(claim), c.Payload.resumed, false
	isLate := slices.Contains(c.Payload.lateRecords, id)
	switch {
	case c.State.InProgress() && isLate && id != c.Args:
		return intent.None
	case c.State.InProgress():
		own = id == c.Args
	case c.State == intent.Settled:
		own = hasVolume || c.Payload.saved || id == c.Args || resumed != "" && id == resumed || isLate
	default:
		own = hasVolume || isLate
	}
	if own {
		return intent.Own
	}
	return intent.Other
}

// recordIDOf returns the ID of the record on claim, or "" if a user has removed or changed the record.
func recordIDOf(claim *corev1.PersistentVolumeClaim) string {
	record, _ := recordOf(claim)
	return ptr.Deref(record, requestRecord{}).ID
}

func isProtected(claim *corev1.PersistentVolumeClaim) bool {
	return slices.Contains(claim.Finalizers, kube.ProvisioningFinalizer)
}

// recordable reports whether claim can get a record: a finalizer cannot be added to a claim that is being deleted. Nil is deleted.
func recordable(claim *corev1.PersistentVolumeClaim) bool {
	return claim != nil && (claim.DeletionTimestamp == nil || isProtected(claim))
}

// recordOf reads the record on a protected claim; nil if a user has removed it. With an error, it has the fields that can be read.
func recordOf(claim *corev1.PersistentVolumeClaim) (*requestRecord, error) {
	text, recorded := claim.Annotations[kube.AnnProvisioningRequest]
	if !recorded {
		return nil, nil
	}
	r := &requestRecord{}
	if err := json.Unmarshal([]byte(text), r); err != nil {
		return r, fmt.Errorf("annotation %s: %w", kube.AnnProvisioningRequest, err)
	}
	return r, nil
}

func hasRecord(claim *corev1.PersistentVolumeClaim) bool {
	return isProtected(claim) && claim.Annotations[kube.AnnProvisioningRequest] != ""
}

// nodeOf returns the node that was selected for the recorded request.
func nodeOf(claim *corev1.PersistentVolumeClaim) string {
	if r, err := recordOf(claim); err == nil && r != nil {
		return r.SelectedNode
	}
	return selectedNode(claim)
}

// isForThisNode reports whether this instance repeats the recorded request of claim: with --node-deployment, each one those for its node.
func (d driver) isForThisNode(claim *corev1.PersistentVolumeClaim) bool {
	return !d.NodeDeployment || nodeOf(claim) == d.NodeName
}

// recordedWithoutNode reports whether the recorded request is that of a central provisioner, for a claim without a selected node.
func recordedWithoutNode(claim *corev1.PersistentVolumeClaim) bool {
	r, err := recordOf(claim)
	return err == nil && r != nil && r.SelectedNode == ""
}

// renewsRecord reports whether the record gets a new ID before the request of an earlier process is repeated: with the old one, a late
// write of that process could remove it. The finalizer alone, which that process or a user has left, has none.
func (o operation) renewsRecord() bool { return o.resumed != "" }

// policy returns when CreateVolume is recorded on the claim. After the record of an earlier request got no response, the next request is
// recorded before its first call: the API server stores no late record over another one.
func (d driver) policy(s claimState) intent.Policy {
	p := intent.Policy{AtOnce: true, Renew: s.call.Payload.renewsRecord()}
	// The instances on other nodes must not release the source of a deleted claim.
	sharesSource := d.NodeDeployment && s.call.Payload.source != nil
	switch {
	case d.ProvisioningProtection == ProtectionOff:
	case d.ProvisioningProtection == ProtectionAlways || sharesSource || len(s.call.Payload.lateRecords) > 0:
		p.Record = intent.BeforeCall
	default:
		p.Record = intent.OnUnknown
	}
	return p
}

// mayBeFirst reports whether the first CreateVolume of a request may be sent: the claim needs a volume, and has the record if there must be
// one.
func (d driver) mayBeFirst(s claimState) bool {
	if s.claim == nil || !needsVolume(s.claim) {
		return false
	}
	return d.policy(s).Record != intent.BeforeCall || isProtected(s.claim) && recordIDOf(s.claim) == s.call.Args
}

// protect records the request on the claim. An operation whose outcome is unknown continues
// if that fails: the result of the call ends it, too. That of an earlier process waits, because late writes of that process
// could remove its record during the call, unless the API server refuses the new one or a webhook changes it.
func (l *claimLoop) protect(ctx context.Context, s claimState) (change, error) {
	o := s.call.Payload
	client := l.c.deps.Client
	if s.call.State.MayHaveEffect() {
		var cancel context.CancelFunc
		ctx, cancel, client = l.c.outlive(ctx) // the record is for the next leader
		defer cancel()
	}
	patch, err := o.protection(l.c.driver.name, s.call.Args, s.claim)
	wait := s.call.State == intent.Planned
	if err == nil {
		err = l.patchClaim(ctx, client, s.claim, patch)
		wait = wait || o.renewsRecord() && err != nil && !kube.RecordRefused(err)
	}
	if err == nil || l.claims.Outdated(s.claim, err) {
		return change{}, nil
	}
	if !kube.RecordRefused(err) {
		l.ops.recordLost(keyOf(s.claim), s.call.Args)
	}
	err = fmt.Errorf("adding finalizer %s: %w", kube.ProvisioningFinalizer, err)
	l.c.claimFailed(s.claim, failedEvent(o.plan.ClassName, err))
	if wait {
		return change{}, err
	}
	klog.FromContext(ctx).Error(err, "Adding the finalizer to the PVC failed", "stage", stageOf(s.call))
	return change{Event: intent.Refuse}, nil
}

func (l *claimLoop) unprotect(ctx context.Context, s claimState) (change, error) {
	err := l.patchClaim(ctx, l.c.deps.Client, s.claim, unprotection(s.claim))
	switch {
	case l.claims.Outdated(s.claim, err):
		return change{}, nil
	case err != nil:
		err = fmt.Errorf("removing finalizer %s from claim %s: %w", kube.ProvisioningFinalizer, kube.Key(s.claim), err)
		if kube.IsRefused(err) {
			l.c.event(s.claim, failedEvent(storagehelpers.GetPersistentVolumeClaimClass(s.claim), err))
		}
		return change{}, err
	case s.call.Payload.saved:
		return change{}, nil
	}
	return change{Event: intent.Reset}, nil
}
