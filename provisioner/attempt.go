package provisioner

import (
	"bytes"
	"compress/zlib"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
)

// attempt is a volume that is coming into being for a claim. While its outcome is
// in doubt, exactly the same request is repeated, and only an answer of the driver
// ends it.
type attempt struct {
	claim   *corev1.PersistentVolumeClaim // as it was last seen; it may be gone
	request *csi.CreateVolumeRequest      // with the secrets, if they could be read
	plan    plan
	source  *sourceKey // what the volume is a copy of; nil: of nothing
	asked   bool       // the driver was, in this process
	// doubt tells that a call was made whose outcome is not known, or that a
	// volume was made that cannot be used and is not deleted yet.
	doubt bool
	// unnoted tells that the claim could not be protected after the last call; that is
	// tried again after the next one.
	unnoted bool
	// volume is the PersistentVolume of the volume that was made, to be saved, and
	// handle the ID of that.
	volume *corev1.PersistentVolume
	handle string
	// waste is the ID of a volume that was made and cannot be used, place where it is,
	// and wasteful why.
	waste    string
	place    *corev1.VolumeNodeAffinity
	wasteful error
}

// progress is what is remembered of a claim from its first attempt until it is
// bound or gone.
type progress struct {
	began     time.Time // of the work for this claim
	attempt   *attempt  // nil: nothing is in progress at the driver
	saved     bool      // its PersistentVolume was created
	lost      bool      // that has gone since
	settled   bool      // the driver gave a final answer; the claim may still be protected
	announced bool      // that provisioning goes on was said in an event
	// infeasible is set while the driver is not asked again for what it called invalid.
	infeasible *infeasible
	// stuck counts failures in a row for lack of topology.
	stuck int
	// race is that for the ownership of the claim, in a node deployment.
	race race
}

// infeasible is a request that the driver called invalid. It is not repeated
// before until, unless something that it was made of changes.
type infeasible struct {
	until          time.Time
	classUID       types.UID
	classVersion   string
	requestedBytes int64
	attributes     string // name of the VolumeAttributesClass
}

// requestRecord is what is kept of an attempt on its claim, for a process that comes
// after this one. Whoever may write the claim can write it too, so that it has
// nothing that the claim and its class do not say: the request is made from them
// anew, with the topology of the record, and has to come out the same.
type requestRecord struct {
	Driver string `json:"driver"` // as kube.InDoubt reads it
	// Request is a hash of the request without the values of its secrets.
	Request string `json:"request"`
	// Topology is a csi.TopologyRequirement, compressed: one segment per node makes it
	// large. Nil for none.
	Topology     []byte `json:"topology,omitempty"`
	SelectedNode string `json:"selectedNode,omitempty"`
}

const (
	// maxRecord bounds the annotation; all annotations of an object have 256 KiB together.
	maxRecord = 128 * 1024
	// maxTopology bounds what a topology of a record, which anybody may write, expands to.
	maxTopology = 16 << 20
)

// packTopology is t for a record.
func packTopology(t *csi.TopologyRequirement) ([]byte, error) {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(t)
	if err != nil {
		return nil, fmt.Errorf("encoding the topology: %w", err)
	}
	var packed bytes.Buffer
	w := zlib.NewWriter(&packed)
	if _, err = w.Write(data); err == nil {
		err = w.Close()
	}
	return packed.Bytes(), err // a buffer takes everything: err is nil
}

// unpackTopology undoes packTopology.
func unpackTopology(packed []byte) (*csi.TopologyRequirement, error) {
	r, err := zlib.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(r, maxTopology))
	if err != nil {
		return nil, err
	}
	t := &csi.TopologyRequirement{}
	return t, proto.Unmarshal(data, t)
}

// fingerprint is a hash of a request without the values of its secrets.
func fingerprint(request *csi.CreateVolumeRequest) (string, error) {
	bare := proto.CloneOf(request)
	bare.Secrets = nil
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(bare)
	if err != nil {
		return "", fmt.Errorf("encoding the request: %w", err)
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:]), nil
}

// protection is the change that keeps the claim of a until its outcome is known.
func (a *attempt) protection(driver string) (kube.MetadataPatch, error) {
	r := requestRecord{Driver: driver, SelectedNode: a.plan.SelectedNode}
	var err error
	if r.Request, err = fingerprint(a.request); err != nil {
		return kube.MetadataPatch{}, err
	}
	if t := a.request.GetAccessibilityRequirements(); t != nil {
		if r.Topology, err = packTopology(t); err != nil {
			return kube.MetadataPatch{}, err
		}
	}
	data, err := json.Marshal(r)
	if err != nil {
		return kube.MetadataPatch{}, fmt.Errorf("encoding the record of the request: %w", err)
	}
	if len(data) > maxRecord {
		return kube.MetadataPatch{}, fmt.Errorf("the record of the request has %d bytes, too many for an annotation", len(data))
	}
	return kube.MetadataPatch{AddFinalizers: []string{claimFinalizer}, SetAnnotations: map[string]string{annRequest: string(data)}}, nil
}

// unprotection undoes protection.
var unprotection = kube.MetadataPatch{RemoveFinalizers: []string{claimFinalizer}, RemoveAnnotations: []string{annRequest}}

func isProtected(claim *corev1.PersistentVolumeClaim) bool {
	return slices.Contains(claim.Finalizers, claimFinalizer)
}

// recordOf reads the note on a protected claim; nil when somebody has removed it.
func recordOf(claim *corev1.PersistentVolumeClaim) (*requestRecord, error) {
	text, recorded := claim.Annotations[annRequest]
	if !recorded {
		return nil, nil
	}
	r := &requestRecord{}
	if err := json.Unmarshal([]byte(text), r); err != nil {
		return nil, fmt.Errorf("annotation %s: %w", annRequest, err)
	}
	return r, nil
}

// nodeOf is the node that was selected when the volume of a protected claim was asked for.
func nodeOf(claim *corev1.PersistentVolumeClaim) string {
	if r, err := recordOf(claim); err == nil && r != nil {
		return r.SelectedNode
	}
	return selectedNode(claim)
}

// resume is the attempt that an earlier process left on a protected claim.
func (d driver) resume(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, named *found, known *topology.Aggregate) (*attempt, error) {
	class, err := d.translated(class)
	if err != nil {
		return nil, err
	}
	record, err := recordOf(claim)
	if err != nil {
		return nil, err
	}
	a := &attempt{claim: claim, doubt: true}
	if named != nil {
		a.source = named.source
	}
	if record == nil { // what can be told is what would be asked now
		node := selectedNode(claim)
		a.request, a.plan, err = d.prepare(claim, class, node, named, d.requirementFor(claim, class, node, known))
		return a, err
	}
	var topology *csi.TopologyRequirement
	if record.Topology != nil {
		if topology, err = unpackTopology(record.Topology); err != nil {
			return nil, fmt.Errorf("annotation %s: %w", annRequest, err)
		}
	}
	a.request, a.plan, err = d.prepare(claim, class, record.SelectedNode, named, func() (*csi.TopologyRequirement, error) { return topology, nil })
	if err != nil {
		return nil, err
	}
	now, err := fingerprint(a.request)
	if err != nil {
		return nil, err
	}
	if now != record.Request {
		return nil, fmt.Errorf("a volume may be coming into being for this claim, and what was asked of the driver for it cannot be repeated: "+
			"StorageClass %q, what the claim names, or the flags of the provisioner have changed since. Change them back, or, if the driver has no volume %q, remove the finalizer %s",
			class.Name, a.plan.VolumeName, claimFinalizer)
	}
	return a, nil
}
