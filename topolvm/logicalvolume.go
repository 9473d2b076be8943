// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package topolvm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	"google.golang.org/grpc/codes"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// LogicalVolume is the custom resource from which topolvm-node creates an LVM volume. It is cluster-scoped, and both groups of TopoLVM
// have the same schema.
type LogicalVolume struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   Spec   `json:"spec"`
	Status Status `json:"status,omitzero"`
}

// Spec is the requested state. The service writes it.
type Spec struct {
	Name                string `json:"name"`
	NodeName            string `json:"nodeName"` // value of the topology key
	Size                Bytes  `json:"size"`
	DeviceClass         string `json:"deviceClass,omitempty"` // empty means the default class
	LvcreateOptionClass string `json:"lvcreateOptionClass,omitempty"`
	Source              string `json:"source,omitempty"`     // name of a LogicalVolume
	AccessType          string `json:"accessType,omitempty"` // "ro" for a snapshot, "rw" for a volume with a source
}

// Status is the state of the LVM volume. topolvm-node writes it.
type Status struct {
	VolumeID    string `json:"volumeID,omitempty"` // equals metadata.uid. Empty: there is no LVM volume yet
	CurrentSize Bytes  `json:"currentSize,omitzero"`
	Code        int64  `json:"code,omitempty"` // of gRPC, of the last failure. 0 after a success
	Message     string `json:"message,omitempty"`
}

// LogicalVolumeList is a list of LogicalVolumes.
type LogicalVolumeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []LogicalVolume `json:"items"`
}

// Bytes is a size. In JSON it is a quantity. One that cannot be parsed is 0, so that one object does not make a list fail.
type Bytes int64

// String returns b as a quantity such as 1Gi.
func (b Bytes) String() string { return resource.NewQuantity(int64(b), resource.BinarySI).String() }

// MarshalJSON implements [json.Marshaler].
func (b Bytes) MarshalJSON() ([]byte, error) { return json.Marshal(b.String()) }

// UnmarshalJSON implements [json.Unmarshaler].
func (b *Bytes) UnmarshalJSON(data []byte) error {
	*b = 0
	if q, err := resource.ParseQuantity(string(bytes.Trim(data, `"`))); err == nil {
		*b = Bytes(q.Value())
	}
	return nil
}

// DeepCopyObject implements [runtime.Object].
func (lv *LogicalVolume) DeepCopyObject() runtime.Object {
	out := *lv
	lv.DeepCopyInto(&out.ObjectMeta)
	return &out
}

// DeepCopyObject implements [runtime.Object].
func (l *LogicalVolumeList) DeepCopyObject() runtime.Object {
	out := *l
	l.ListMeta.DeepCopyInto(&out.ListMeta)
	out.Items = make([]LogicalVolume, len(l.Items))
	for i := range l.Items {
		out.Items[i] = *l.Items[i].DeepCopyObject().(*LogicalVolume)
	}
	return &out
}

// terminating reports whether lv is being deleted.
func (lv *LogicalVolume) terminating() bool { return lv.DeletionTimestamp != nil }

// exists reports whether topolvm-node has created the LVM volume.
func (lv *LogicalVolume) exists() bool { return lv.Status.VolumeID != "" }

// IsSnapshot reports whether lv is a snapshot, not a volume.
func (lv *LogicalVolume) IsSnapshot() bool { return lv.Spec.AccessType == readOnly }

// code returns the gRPC code of the last failure of topolvm-node.
func (lv *LogicalVolume) code() codes.Code { return codes.Code(uint32(lv.Status.Code)) }

// HasID reports whether id is the ID of the volume or the snapshot lv.
func (lv *LogicalVolume) HasID(id string) bool {
	return string(lv.UID) == id || id != "" && lv.Status.VolumeID == id
}

// Claim returns NAMESPACE/NAME of the claim for which lv was created; "" if that is not recorded.
func (lv *LogicalVolume) Claim() string { return lv.Annotations[annotationClaim] }

// Failure returns the name of the gRPC code of the last failure of topolvm-node, and its message; "" after a success.
func (lv *LogicalVolume) Failure() (code, message string) {
	if lv.Status.Code == 0 {
		return "", ""
	}
	return lv.code().String(), lv.Status.Message
}

// Describe returns the name, the node and the device class of lv for a message.
func (lv *LogicalVolume) Describe() string { return subjectOf(lv).String() }

// IsIgnored reports whether topolvm-node ignores lv, because the node cleanup of driver deletes it.
func (lv *LogicalVolume) IsIgnored(driver string) bool {
	return lv.Annotations[names(driver).pendingDeletion()] != ""
}

// ObjectName returns the name of the LogicalVolume that is created for a name in a CSI request.
func ObjectName(requested string) string { return strings.ToLower(requested) }

// requestedName returns the name in the CSI request that created lv; "" if it is not recorded, as in those of topolvm-controller.
func (lv *LogicalVolume) requestedName() string { return lv.Annotations[annotationVolumeName] }

// Client reads and writes the LogicalVolumes of one group.
type Client = gentype.ClientWithList[*LogicalVolume, *LogicalVolumeList]

// NewClient returns a client of the LogicalVolumes in the group driver.
func NewClient(cfg *rest.Config, driver string) (*Client, error) {
	gvr := names(driver).resource()
	version := gvr.GroupVersion()
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(version, &LogicalVolume{}, &LogicalVolumeList{})
	metav1.AddToGroupVersion(scheme, version)
	c := kube.ForCustomResources(cfg)
	c.GroupVersion, c.APIPath = &version, "/apis"
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("creating the client of %s: %w", gvr.GroupResource(), err)
	}
	return gentype.NewClientWithList(gvr.Resource, client, runtime.NewParameterCodec(scheme), "",
		func() *LogicalVolume {
			return &LogicalVolume{TypeMeta: metav1.TypeMeta{APIVersion: version.String(), Kind: "LogicalVolume"}}
		},
		func() *LogicalVolumeList { return &LogicalVolumeList{} }), nil
}

// byID is an index of [source]: the [kube.Bucket] of the UID and of the volume ID.
const byID = "id"

// source returns the watch of the LogicalVolumes of client.
func source(n names, client *Client) kube.Source[*LogicalVolumeList] {
	return kube.Source[*LogicalVolumeList]{
		Resource: n.resource(), Object: &LogicalVolume{}, List: client.List, Watch: client.Watch,
		Transform: func(obj any) (any, error) {
			if lv, ok := obj.(*LogicalVolume); ok {
				trim(n, lv)
			}
			return obj, nil
		},
		Indexers: cache.Indexers{byID: func(obj any) ([]string, error) {
			lv, ok := obj.(*LogicalVolume)
			if !ok {
				return nil, nil
			}
			buckets := []string{kube.Bucket(string(lv.UID))}
			if id := lv.Status.VolumeID; id != "" && id != string(lv.UID) {
				buckets = append(buckets, kube.Bucket(id))
			}
			return buckets, nil
		}},
	}
}

// trim removes what the service does not read.
func trim(n names, lv *LogicalVolume) {
	lv.TypeMeta, lv.ManagedFields, lv.Labels, lv.OwnerReferences = metav1.TypeMeta{}, nil, nil, nil
	maps.DeleteFunc(lv.Annotations, func(key, _ string) bool { return !n.owns(key) })
	lv.Spec.Name = lv.Name
	if lv.Status.VolumeID == string(lv.UID) { // so that both share their memory
		lv.Status.VolumeID = string(lv.UID)
	}
}
