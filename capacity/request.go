// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// request returns the GetCapacity request for class in s. The parameters are unmodified,
// as in a CreateVolume request.
func request(class *storagev1.StorageClass, s segment) *csi.GetCapacityRequest {
	return &csi.GetCapacityRequest{Parameters: class.Parameters, AccessibleTopology: &csi.Topology{Segments: s.labels()}}
}

// values holds the published values of a GetCapacity response.
type values struct {
	capacity resource.Quantity
	maximum  *resource.Quantity // of one volume; nil: unknown
}

// parseResponse validates a GetCapacity response.
func parseResponse(r *csi.GetCapacityResponse) (values, error) {
	if r.GetAvailableCapacity() < 0 {
		return values{}, fmt.Errorf("available_capacity %d is negative", r.GetAvailableCapacity())
	}
	v := values{capacity: *resource.NewQuantity(r.GetAvailableCapacity(), resource.BinarySI)}
	if m := r.GetMaximumVolumeSize(); m != nil {
		if m.GetValue() < 0 {
			return values{}, fmt.Errorf("maximum_volume_size %d is negative", m.GetValue())
		}
		v.maximum = resource.NewQuantity(m.GetValue(), resource.BinarySI)
	}
	return v, nil
}
