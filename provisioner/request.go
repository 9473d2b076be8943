package provisioner

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/topology"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// driver is what is fixed for the life of a process: who the driver is, what it
// can do, and what the operator set.
type driver struct {
	Config
	name                  string
	controllerService     bool // plugin capability CONTROLLER_SERVICE
	createsVolumes        bool // CREATE_DELETE_VOLUME
	publishes             bool // PUBLISH_UNPUBLISH_VOLUME
	singleNodeMultiWriter bool // SINGLE_NODE_MULTI_WRITER
	restores              bool // CREATE_DELETE_SNAPSHOT
	clones                bool // CLONE_VOLUME
	modifies              bool // MODIFY_VOLUME
	getsCapacity          bool // GET_CAPACITY
	topology              bool // VOLUME_ACCESSIBILITY_CONSTRAINTS, and the gate is on
	identity              string
	inTree                string            // the in-tree plugin that the driver replaced; "" for none
	segments              map[string]string // of this node, in a node deployment
}

// plan is what a PersistentVolume takes from claim and class. It is made together
// with the request and kept with it, so that a volume whose creation was in doubt
// becomes what was asked for, whatever has happened to claim and class since.
type plan struct {
	VolumeName      string
	ClassName       string
	Provisioner     string // of the class: the driver, or the plugin that it has replaced
	Migrated        bool   // the volume gets the source of that plugin
	ReclaimPolicy   *corev1.PersistentVolumeReclaimPolicy
	MountOptions    []string
	AccessModes     []corev1.PersistentVolumeAccessMode
	VolumeMode      *corev1.PersistentVolumeMode
	AttributesClass string
	FSType          string
	SelectedNode    string
	Secrets         volumerules.Secrets
}

// check refuses a claim that cannot be provisioned, before anything is read for it. class
// is as the driver knows it, see [driver.translated].
func (d driver) check(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) error {
	if err := d.checkSupported(claim); err != nil {
		return err
	}
	_, p, err := d.basics(claim, class)
	if err == nil {
		_, err = d.capabilities(p)
	}
	return err
}

// basics is what follows from claim and class alone.
func (d driver) basics(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) (parameters map[string]string, p plan, err error) {
	p = plan{
		VolumeName: d.volumeName(claim.UID), ClassName: storagehelpers.GetPersistentVolumeClaimClass(claim), Provisioner: class.Provisioner,
		Migrated: d.isMigrated(class), ReclaimPolicy: class.ReclaimPolicy, MountOptions: class.MountOptions,
		AccessModes: claim.Spec.AccessModes, VolumeMode: claim.Spec.VolumeMode, AttributesClass: d.attributesClass(claim),
	}
	parameters, fsType, err := d.parameters(class.Parameters)
	if !volumerules.IsBlock(claim.Spec.VolumeMode) {
		p.FSType = fsType
	}
	return parameters, p, err
}

// prepare makes the request for the volume of a claim, without the values of its
// secrets. named is what was read of the objects that the claim names, nil for
// none; require is asked for the topology, if the driver has any. What the driver
// is asked depends on the arguments alone.
func (d driver) prepare(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, node string, named *found,
	require func() (*csi.TopologyRequirement, error)) (*csi.CreateVolumeRequest, plan, error) {
	parameters, p, err := d.basics(claim, class)
	p.SelectedNode = node
	if err != nil {
		return nil, p, err
	}
	if d.ExtraCreateMetadata {
		parameters[volumerules.ParameterPrefix+"pvc/name"] = claim.Name
		parameters[volumerules.ParameterPrefix+"pvc/namespace"] = claim.Namespace
		parameters[volumerules.ParameterPrefix+"pv/name"] = p.VolumeName
	}
	request := &csi.CreateVolumeRequest{Name: p.VolumeName, Parameters: parameters, CapacityRange: capacityRange(claim)}
	if named != nil {
		request.VolumeContentSource, request.MutableParameters = named.content, named.mutable
	}
	if request.VolumeCapabilities, err = d.capabilities(p); err != nil {
		return nil, p, err
	}
	if d.topology {
		if request.AccessibilityRequirements, err = require(); err != nil {
			return nil, p, err
		}
	}
	p.Secrets, err = volumerules.ResolveSecrets(class.Parameters, volumerules.SecretScope{
		Volume: p.VolumeName, Claim: claim.Name, Namespace: claim.Namespace, Annotations: claim.Annotations,
	})
	if err == nil {
		err = p.Secrets.Permitted(d.SecretNamespaces)
	}
	return request, p, err
}

// requirementFor is where the volume of a claim may be, as far as is known now.
func (d driver) requirementFor(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, node string, known *topology.Aggregate) func() (*csi.TopologyRequirement, error) {
	return func() (*csi.TopologyRequirement, error) {
		return requirement(topologyRequest{
			strict: d.StrictTopology, immediate: d.ImmediateTopology, allowed: class.AllowedTopologies, node: node, claim: claim.Name,
		}, known)
	}
}

// checkSupported refuses what the driver cannot do. A claim that names a source is
// never given an empty volume instead.
func (d driver) checkSupported(claim *corev1.PersistentVolumeClaim) error {
	source, err := volumerules.SourceOf(claim, d.CrossNamespaceVolumeDataSource)
	if err != nil {
		return err
	}
	lacks := func(what, capability string) error {
		return fmt.Errorf("driver %q does not support %s: it does not report %s", d.name, what, capability)
	}
	switch {
	case !d.controllerService || !d.createsVolumes:
		return lacks("dynamic provisioning", "CONTROLLER_SERVICE and CREATE_DELETE_VOLUME")
	case source != nil && source.Kind == kube.KindSnapshot && !d.restores:
		return lacks(fmt.Sprintf("restoring snapshots (data source %s)", source), "CREATE_DELETE_SNAPSHOT")
	case source != nil && source.Kind == kube.KindClaim && !d.clones:
		return lacks(fmt.Sprintf("cloning volumes (data source %s)", source), "CLONE_VOLUME")
	case d.attributesClass(claim) != "" && !d.modifies:
		return lacks(fmt.Sprintf("VolumeAttributesClass %q", d.attributesClass(claim)), "MODIFY_VOLUME")
	case claim.Spec.Selector != nil:
		return errors.New("spec.selector: a claim with a selector cannot be provisioned dynamically")
	}
	return nil
}

// capacityRange asks for what the claim requests, rounded up to bytes, and sets no limit.
func capacityRange(claim *corev1.PersistentVolumeClaim) *csi.CapacityRange {
	request := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	return &csi.CapacityRange{RequiredBytes: request.Value()}
}

// parameters is those of a class that are for the driver, and its file system.
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
			return nil, "", fmt.Errorf("class parameter %s: unknown, and everything that begins with %s is reserved", key, volumerules.ParameterPrefix)
		}
	}
	if len(fsTypeKeys) > 1 {
		return nil, "", fmt.Errorf("class parameters %v: only one of them may be set", fsTypeKeys)
	}
	return forDriver, fsType, nil
}

// capabilities is one for each access mode of the claim, in their order.
func (d driver) capabilities(p plan) ([]*csi.VolumeCapability, error) {
	var out []*csi.VolumeCapability
	for _, m := range p.AccessModes {
		mode, err := d.accessMode(m)
		if err != nil {
			return nil, err
		}
		c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
		if volumerules.IsBlock(p.VolumeMode) {
			c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		} else {
			c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: p.FSType, MountFlags: p.MountOptions}}
		}
		out = append(out, c)
	}
	return out, nil
}

func (d driver) accessMode(m corev1.PersistentVolumeAccessMode) (csi.VolumeCapability_AccessMode_Mode, error) {
	switch m {
	case corev1.ReadWriteOnce:
		if d.singleNodeMultiWriter {
			return csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER, nil
		}
		return csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, nil
	case corev1.ReadWriteOncePod:
		if d.singleNodeMultiWriter {
			return csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, nil
		}
		return csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, nil
	case corev1.ReadOnlyMany:
		return csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, nil
	case corev1.ReadWriteMany:
		return csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, nil
	}
	return 0, fmt.Errorf("spec.accessModes: %q is not supported", m)
}

// selectedNode is the node that the scheduler chose, or "".
func selectedNode(claim *corev1.PersistentVolumeClaim) string {
	if node, ok := claim.Annotations[storagehelpers.AnnSelectedNode]; ok {
		return node
	}
	return claim.Annotations[annSelectedNodeAlpha]
}
