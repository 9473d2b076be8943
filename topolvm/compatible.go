// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"context"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// creation is a valid request for a volume or a snapshot.
type creation struct {
	requested string // name in the request
	name      string // of the LogicalVolume
	snapshot  bool
	size      Bytes // of a volume
	required  Bytes // size in the request, without the minimum
	limit     Bytes // 0 means none
	class     string
	option    string
	sourceID  string // of a volume or a snapshot; empty means none
	require   requirement
	claim     string // namespace/name; may be empty
}

// requestOf returns the creation that r asks for.
func (s *Service) requestOf(ctx context.Context, r *csi.CreateVolumeRequest) (creation, error) {
	c, err := named(r.GetName())
	if err != nil {
		return c, err
	}
	c.class = s.parameter(ctx, r.GetParameters(), s.names.deviceClass())
	c.option = s.parameter(ctx, r.GetParameters(), s.names.optionClass())
	about := c.subject()
	if why := unsupported(r.GetVolumeCapabilities()); why != "" {
		return c, about.errorf(codes.InvalidArgument, "%s", why)
	}
	if len(r.GetMutableParameters()) > 0 {
		return c, about.errorf(codes.InvalidArgument, "mutable_parameters are not supported. Remove the VolumeAttributesClass")
	}
	c.required = Bytes(r.GetCapacityRange().GetRequiredBytes())
	c.limit = Bytes(r.GetCapacityRange().GetLimitBytes())
	c.size, err = sizeOf(about, r.GetCapacityRange(), s.cfg.Minimum.of(r.GetVolumeCapabilities()))
	if err != nil {
		return c, err
	}
	switch from := r.GetVolumeContentSource(); {
	case from == nil:
	case from.GetSnapshot() != nil:
		c.sourceID = from.GetSnapshot().GetSnapshotId()
	case from.GetVolume() != nil:
		c.sourceID = from.GetVolume().GetVolumeId()
	default:
		return c, about.errorf(codes.InvalidArgument, "the type of volume_content_source is unknown. Check the data source of the claim")
	}
	if c.sourceID == "" && r.GetVolumeContentSource() != nil {
		return c, about.errorf(codes.NotFound, "the ID of the source is empty. Check the data source of the claim")
	}
	require, ok := requirementOf(s.names.topologyKey(), r.GetAccessibilityRequirements())
	if !ok {
		return c, about.errorf(codes.InvalidArgument, "accessibility_requirements have no segment with the key %s. Check the "+
			"allowedTopologies of the StorageClass, and that topolvm-node runs on the nodes", s.names.topologyKey())
	}
	c.require = require
	if name, namespace := r.GetParameters()[paramClaim], r.GetParameters()[paramNamespace]; name != "" && namespace != "" {
		c.claim = namespace + "/" + name
	}
	return c, nil
}

// named returns a creation with the name of a request.
func named(name string) (creation, error) {
	lower := ObjectName(name)
	if problems := validation.IsDNS1123Subdomain(lower); len(problems) > 0 {
		return creation{}, status.Errorf(codes.InvalidArgument, "name %.253q is not one of a LogicalVolume: %s. Change the prefix of "+
			"volume names", name, strings.Join(problems, "; "))
	}
	return creation{requested: name, name: lower}, nil
}

// unsupported returns why a volume cannot have the capabilities, or "".
func unsupported(capabilities []*csi.VolumeCapability) string {
	if len(capabilities) == 0 {
		return "volume_capabilities must not be empty"
	}
	for _, c := range capabilities {
		mode := c.GetAccessMode()
		switch {
		case c.GetBlock() == nil && c.GetMount() == nil:
			return "a volume capability must have the access type block or mount"
		case mode != nil && mode.GetMode() != csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:
			return "access mode " + mode.GetMode().String() + " is not supported. Use ReadWriteOnce or ReadWriteOncePod"
		}
	}
	return ""
}

// subject returns the subject of messages before there is a LogicalVolume. The class of a snapshot is that of its source.
func (c creation) subject() subject {
	if c.snapshot {
		return subject{lv: c.name}
	}
	return subject{lv: c.name, class: &c.class}
}

// differs returns why lv is not the result of the request, or "". from is the name of the source in the request, empty if it is not
// known: the source was deleted after the creation.
func (c creation) differs(lv *LogicalVolume, from string) string {
	access := lv.Spec.AccessType
	switch {
	case lv.requestedName() != "" && lv.requestedName() != c.requested:
		return "it was created for the name " + lv.requestedName()
	case c.snapshot && access != readOnly:
		return "it is a volume, not a snapshot"
	case !c.snapshot && access == readOnly:
		return "it is a snapshot, not a volume"
	case !c.snapshot && (c.sourceID != "") != (access == readWrite), (c.sourceID != "") != (lv.Spec.Source != ""),
		from != "" && lv.Spec.Source != from:
		return "it has another source"
	case c.snapshot:
		return ""
	case lv.Spec.DeviceClass != c.class:
		return "it has another device class"
	case lv.Spec.Size < c.required: // the minimum may have been another one
		return "its size of " + lv.Spec.Size.String() + " is less than the requested " + c.required.String()
	case c.limit > 0 && lv.Spec.Size > c.limit:
		return "its size of " + lv.Spec.Size.String() + " is above the limit of " + c.limit.String()
	}
	return ""
}

// object returns the LogicalVolume to create in the topology value, from a source, which may be nil.
func (c creation) object(n names, value string, source *LogicalVolume) *LogicalVolume {
	lv := &LogicalVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name: c.name, Finalizers: []string{n.finalizer()}, Labels: map[string]string{labelCreatedBy: createdBy},
			Annotations: map[string]string{annotationVolumeName: c.requested},
		},
		Spec: Spec{
			Name: c.name, NodeName: value, Size: c.size, DeviceClass: c.class, LvcreateOptionClass: c.option,
		},
	}
	lv.APIVersion, lv.Kind = n.resource().GroupVersion().String(), "LogicalVolume"
	if c.claim != "" {
		lv.Annotations[annotationClaim] = c.claim
	}
	if source != nil {
		lv.Spec.Source, lv.Spec.AccessType = source.Name, readWrite
	}
	if c.snapshot {
		lv.Spec.Size, lv.Spec.DeviceClass, lv.Spec.AccessType = source.Status.CurrentSize, source.Spec.DeviceClass, readOnly
	}
	return lv
}
