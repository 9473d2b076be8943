// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// driver holds the settings, and the name and the capabilities of the driver. It does not
// change while the process runs.
type driver struct {
	Config
	name     string
	caps     csiclient.ControllerCapabilities
	topology bool // VOLUME_ACCESSIBILITY_CONSTRAINTS, and the gate is on
	identity string
	inTree   string            // in-tree plugin that the driver replaced; "" for none
	segments map[string]string // topology of this node, with distributed provisioning
}

// plan holds what a PersistentVolume takes from claim and class. It is created and recorded
// together with the request, so that a volume of an indeterminate CreateVolume matches its
// request, also if claim or class changed meanwhile.
type plan struct {
	VolumeName      string
	ClassName       string
	Provisioner     string // of the class: the driver, or the in-tree plugin that it replaced
	Migrated        bool   // the PersistentVolume gets the source of the in-tree plugin
	ReclaimPolicy   *corev1.PersistentVolumeReclaimPolicy
	MountOptions    []string
	AccessModes     []corev1.PersistentVolumeAccessMode
	VolumeMode      *corev1.PersistentVolumeMode
	AttributesClass string
	FSType          string
	SelectedNode    string
	Secrets         volumerules.Secrets
}

// check returns an error if a claim cannot be provisioned, before anything is read for it. class
// has the parameters of the driver, see [driver.translated].
func (d driver) check(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) error {
	if err := d.checkSupported(claim); err != nil {
		return err
	}
	_, p, err := d.basics(claim, class)
	switch {
	case err != nil:
		return err
	case p.Migrated && p.AttributesClass != "": // no such PersistentVolume can be created
		return fmt.Errorf("volumeAttributesClassName %q: volumes of StorageClass %q, whose provisioner is %s, have no "+
			"VolumeAttributesClass. Use a StorageClass of provisioner %s", p.AttributesClass, p.ClassName, class.Provisioner, d.name)
	}
	_, err = d.capabilities(p)
	return err
}

// basics returns the parameters of CreateVolume and the parts of the plan that depend only on claim and class.
func (d driver) basics(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) (parameters map[string]string, p plan,
	err error) {
	p = plan{
		VolumeName: d.volumeName(claim.UID), Provisioner: class.Provisioner,
		ClassName: storagehelpers.GetPersistentVolumeClaimClass(claim),
		Migrated:  d.isMigrated(class), ReclaimPolicy: class.ReclaimPolicy, MountOptions: class.MountOptions,
		AccessModes: claim.Spec.AccessModes, VolumeMode: claim.Spec.VolumeMode, AttributesClass: d.attributesClass(claim),
	}
	parameters, fsType, err := d.parameters(class.Parameters)
	if !volumerules.IsBlock(claim.Spec.VolumeMode) {
		p.FSType = fsType
	}
	return parameters, p, err
}

// prepare returns the operation that creates the volume of a claim, without the values of its secrets. refs holds the objects
// that the claim references, or is nil. require computes the topology requirement and is called only if the driver has topology.
// The request depends on the arguments alone.
func (d driver) prepare(
	claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, node string, refs *resolvedRefs,
	require func() (*csi.TopologyRequirement, error),
) (operation, error) {
	parameters, p, err := d.basics(claim, class)
	if err != nil {
		return operation{}, err
	}
	p.SelectedNode = node
	if d.ExtraCreateMetadata {
		parameters[volumerules.ParameterPrefix+"pvc/name"] = claim.Name
		parameters[volumerules.ParameterPrefix+"pvc/namespace"] = claim.Namespace
		parameters[volumerules.ParameterPrefix+"pv/name"] = p.VolumeName
	}
	request := &csi.CreateVolumeRequest{Name: p.VolumeName, Parameters: parameters, CapacityRange: capacityRange(claim)}
	o := operation{claim: claim, class: class, request: request}
	if refs != nil {
		request.VolumeContentSource, request.MutableParameters = refs.content, refs.mutable
		o.source, o.sourceBytes = refs.source, refs.sourceBytes
	}
	if request.VolumeCapabilities, err = d.capabilities(p); err != nil {
		return o, err
	}
	if d.topology {
		if request.AccessibilityRequirements, err = require(); err != nil {
			return o, err
		}
	}
	p.Secrets, err = volumerules.ResolveSecrets(class.Parameters, volumerules.SecretScope{
		Volume: p.VolumeName, Claim: claim.Name, Namespace: claim.Namespace, Annotations: claim.Annotations,
	})
	if err == nil {
		err = p.Secrets.Permitted(d.SecretNamespaces)
	}
	o.plan = p
	return o, err
}

// requirementFor returns a function that computes the topology requirement of a claim from the nodes in known.
func (d driver) requirementFor(
	claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, node string, known *topology.Aggregate,
) func() (*csi.TopologyRequirement, error) {
	return func() (*csi.TopologyRequirement, error) {
		return requirement(topologyRequest{
			strict: d.StrictTopology, immediate: d.ImmediateTopology, allowed: class.AllowedTopologies, node: node, claim: claim.Name,
		}, known)
	}
}

// checkSupported returns an error if the driver lacks a capability that the claim needs. A claim
// with a data source never gets an empty volume instead.
func (d driver) checkSupported(claim *corev1.PersistentVolumeClaim) error {
	source, err := volumerules.SourceOf(claim, d.CrossNamespaceVolumeDataSource)
	if err != nil {
		return err
	}
	lacks := func(feature, capability string) error {
		return fmt.Errorf("driver %q does not support %s: it does not report %s", d.name, feature, capability)
	}
	switch {
	case !d.caps.CreateDeleteVolume:
		return lacks("dynamic provisioning", "CONTROLLER_SERVICE and CREATE_DELETE_VOLUME")
	case source != nil && source.Kind == kube.KindSnapshot && !d.caps.CreateDeleteSnapshot:
		return lacks(fmt.Sprintf("restoring snapshots (data source %s)", source), "CREATE_DELETE_SNAPSHOT")
	case source != nil && source.Kind == kube.KindClaim && !d.caps.CloneVolume:
		return lacks(fmt.Sprintf("cloning volumes (data source %s)", source), "CLONE_VOLUME")
	case d.attributesClass(claim) != "" && !d.caps.ModifyVolume:
		return lacks(fmt.Sprintf("VolumeAttributesClass %q", d.attributesClass(claim)), "MODIFY_VOLUME")
	}
	return checkSpec(claim)
}

// checkSpec returns an error if a claim can never be provisioned, whatever the driver supports.
func checkSpec(claim *corev1.PersistentVolumeClaim) error {
	switch size := claim.Spec.Resources.Requests.Storage(); {
	case claim.Spec.Selector != nil:
		return errors.New("spec.selector: a claim with a selector cannot be provisioned dynamically")
	case size.CmpInt64(math.MaxInt64) > 0: // Value is undefined
		return fmt.Errorf("spec.resources.requests.storage: %s is more than the %d bytes of the largest CSI request. "+
			"Recreate the claim with a smaller size", size, int64(math.MaxInt64))
	}
	return nil
}

// capacityRange returns the requested size of a claim, rounded up to bytes, without a limit.
func capacityRange(claim *corev1.PersistentVolumeClaim) *csi.CapacityRange {
	request := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	return &csi.CapacityRange{RequiredBytes: request.Value()}
}

// parameters returns the parameters of a class without those for the sidecars, and the file system type.
func (d driver) parameters(class map[string]string) (forDriver map[string]string, fsType string, err error) {
	forDriver, fsType = map[string]string{}, d.DefaultFSType
	var fsTypeKeys []string
	for _, key := range slices.Sorted(maps.Keys(class)) {
		reserved, isReserved := strings.CutPrefix(key, volumerules.ParameterPrefix)
		if strings.ToLower(key) == "fstype" || reserved == "fstype" && isReserved {
			fsTypeKeys = append(fsTypeKeys, key)
			if class[key] != "" {
				fsType = class[key]
			}
		}
		switch {
		case !isReserved:
			forDriver[key] = class[key]
		case !volumerules.IsParameter(reserved):
			err = fmt.Errorf("class parameter %q: unknown. The prefix %q is reserved", key, volumerules.ParameterPrefix)
			if known := volumerules.Correction(reserved); known != "" {
				err = fmt.Errorf("class parameter %q: unknown. Use %q", key, volumerules.ParameterPrefix+known)
			}
			return nil, "", err
		}
	}
	if len(fsTypeKeys) > 1 {
		return nil, "", fmt.Errorf("class parameters %q: set only one of them", fsTypeKeys)
	}
	return forDriver, fsType, nil
}

// capabilities returns one VolumeCapability for each access mode of the claim, in the same order.
func (d driver) capabilities(p plan) ([]*csi.VolumeCapability, error) {
	var out []*csi.VolumeCapability
	for _, m := range p.AccessModes {
		spec := corev1.PersistentVolumeSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{m}, VolumeMode: p.VolumeMode, MountOptions: p.MountOptions,
		}
		c, err := volumerules.Capability(&spec, p.FSType, d.caps.SingleNodeMultiWriter)
		if err != nil {
			return nil, fmt.Errorf("spec.accessModes: %q is not supported", m)
		}
		out = append(out, c)
	}
	return out, nil
}

// selectedNode returns the node that the scheduler selected for a claim, or "".
func selectedNode(claim *corev1.PersistentVolumeClaim) string {
	if node, ok := claim.Annotations[storagehelpers.AnnSelectedNode]; ok {
		return node
	}
	return claim.Annotations[kube.AnnSelectedNodeAlpha]
}
