// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
)

// rawPod holds the fields of a pod that are read. Nil is absent or null.
type rawPod struct {
	Metadata *rawMeta `json:"metadata"`
	Spec     struct {
		Containers []*struct {
			Resources *rawResources `json:"resources"`
		} `json:"containers"`
		Volumes []rawVolume `json:"volumes"`
	} `json:"spec"`
}

type rawVolume struct {
	PersistentVolumeClaim *struct {
		ClaimName string `json:"claimName"`
	} `json:"persistentVolumeClaim"`
	Ephemeral *struct {
		VolumeClaimTemplate *rawTemplate `json:"volumeClaimTemplate"`
	} `json:"ephemeral"`
}

// rawTemplate holds the fields that are read of the claim template of an ephemeral volume.
type rawTemplate struct {
	Metadata rawMeta `json:"metadata"`
	Spec     struct {
		StorageClassName *string `json:"storageClassName"`
		Resources        struct {
			Requests struct {
				Storage json.RawMessage `json:"storage"`
			} `json:"requests"`
		} `json:"resources"`
	} `json:"spec"`
}

// claimNames returns the names of the claims of the pod, each once. Names that no object can have
// are skipped: the API server rejects them.
func (p *rawPod) claimNames() []string {
	var names []string
	seen := sets.New[string]()
	for _, v := range p.Spec.Volumes {
		if v.PersistentVolumeClaim == nil || seen.Has(v.PersistentVolumeClaim.ClaimName) {
			continue
		}
		name := v.PersistentVolumeClaim.ClaimName
		seen.Insert(name)
		if len(validation.IsDNS1123Subdomain(name)) == 0 {
			names = append(names, name)
		}
	}
	return names
}

// verdict is the response to a request.
type verdict struct {
	patch    []operation // nil: the object stays as it is
	warnings []string    // for the client
	reason   string
}

// maxClaims bounds the claims of a pod that have no volume: each costs a read, and a user who creates a pod chooses their number.
const maxClaims = 256

func tooManyClaims(names []string) verdict {
	return verdict{reason: "TooManyClaims", warnings: []string{fmt.Sprintf(
		"the pod has %d PersistentVolumeClaims without volume, more than %d: it is scheduled without regard to capacity",
		len(names), maxClaims)}}
}

// mutatePod adds the capacity of its unbound claims to a pod.
func (s *Server) mutatePod(ctx context.Context, r *request) (verdict, error) {
	pod := &rawPod{}
	if err := decode(r.Object.Raw, pod); err != nil {
		return verdict{}, badRequest("decoding the pod: %w", err)
	}
	if len(pod.Spec.Volumes) == 0 {
		return verdict{reason: "NoVolumes"}, nil
	}
	if err := s.synced(); err != nil {
		return verdict{}, err // a class that is not cached yet would look like one of another driver
	}
	l := s.newLookup(ctx, r.Namespace)
	// A claim that is being deleted may have been replaced by one of the same name.
	missing := slices.DeleteFunc(pod.claimNames(), func(name string) bool {
		claim := l.claim(name)
		return claim != nil && claim.DeletionTimestamp == nil
	})
	if len(missing) > maxClaims {
		return tooManyClaims(missing), nil
	}
	if err := l.read(missing); err != nil {
		return verdict{}, err
	}
	need, v, err := s.cfg.decide(pod, l)
	switch {
	case err != nil || len(v.patch) == 0:
		return v, err
	case len(need.claims) > maxClaims:
		return tooManyClaims(need.claims), nil
	}
	// The cache may be stale: a claim that is bound by now has its capacity already.
	if err := l.read(need.claims); err != nil {
		return verdict{}, err
	}
	_, v, err = s.cfg.decide(pod, l)
	return v, err
}

// source provides the claims and StorageClasses of a pod.
type source interface {
	claim(name string) *corev1.PersistentVolumeClaim
	deviceClass(class *string) (string, error)
}

// decide returns what pod needs, and the patch that adds it.
func (c Config) decide(pod *rawPod, from source) (capacity, verdict, error) {
	need, err := capacityOf(pod, from)
	return need, c.describe(pod, need), err
}

// capacity is what the volumes of a pod need that do not exist yet.
type capacity struct {
	bytes  map[string]int64 // by device class
	claims []string         // that were counted
	bound  bool             // one claim is bound to a volume of the driver
}

// capacityOf adds up the unbound claims of pod and the claims of its ephemeral volumes. The classes
// of bound claims are looked up only if there is something to patch.
func capacityOf(pod *rawPod, from source) (capacity, error) {
	need := capacity{bytes: map[string]int64{}}
	var bound []*corev1.PersistentVolumeClaim
	for _, name := range pod.claimNames() {
		claim := from.claim(name)
		switch {
		case claim == nil: // a pod may be created before its claim
			continue
		case isBound(claim):
			bound = append(bound, claim)
			continue
		}
		device, err := from.deviceClass(className(claim.Annotations, claim.Spec.StorageClassName))
		if err != nil {
			return need, err
		}
		if device != "" {
			need.claims = append(need.claims, name)
			need.add(device, claim.Spec.Resources.Requests[corev1.ResourceStorage])
		}
	}
	for _, v := range pod.Spec.Volumes {
		if err := need.addTemplate(v, from); err != nil {
			return need, err
		}
	}
	for _, claim := range bound {
		if len(need.bytes) == 0 || need.bound {
			break
		}
		device, err := from.deviceClass(className(claim.Annotations, claim.Spec.StorageClassName))
		if err != nil {
			return need, err
		}
		need.bound = device != ""
	}
	return need, nil
}

// addTemplate adds the claim that v is going to have, if it is an ephemeral volume.
func (c *capacity) addTemplate(v rawVolume, from source) error {
	if v.Ephemeral == nil || v.Ephemeral.VolumeClaimTemplate == nil {
		return nil
	}
	t := v.Ephemeral.VolumeClaimTemplate
	device, err := from.deviceClass(className(t.Metadata.Annotations, t.Spec.StorageClassName))
	if device == "" || err != nil {
		return err
	}
	size, err := parseSize(t.Spec.Resources.Requests.Storage)
	if err != nil {
		return badRequest("decoding the pod: %w", err)
	}
	c.add(device, size)
	return nil
}

// add adds size in bytes, rounded up, to device. The sum is at most what fits.
func (c *capacity) add(device string, size resource.Quantity) {
	bytes := int64(math.MaxInt64)
	switch {
	case size.Sign() <= 0:
		bytes = defaultVolumeSize
	case size.AsApproximateFloat64() < math.MaxInt64: // beyond, the result of Value is undefined
		bytes = size.Value()
	}
	c.bytes[device] += min(bytes, math.MaxInt64-c.bytes[device])
}

// defaultVolumeSize is the size of claims without a request. The API server accepts no such claims, but a claim
// template of a pod reaches the webhook before it is validated.
const defaultVolumeSize = 1 << 30

// isBound reports whether claim has a volume, or is reserved for one.
func isBound(claim *corev1.PersistentVolumeClaim) bool {
	return claim.Status.Phase != corev1.ClaimPending || claim.Spec.VolumeName != ""
}

// describe returns the patch that adds need to pod.
func (c Config) describe(pod *rawPod, need capacity) verdict {
	switch {
	case len(pod.Spec.Containers) == 0 || pod.Spec.Containers[0] == nil:
		return verdict{reason: "NoContainers"} // the API server rejects it
	case len(need.bytes) == 0:
		return verdict{reason: "NoVolumes"}
	case need.bound:
		// The pod can only run where this volume is. If no capacity is available there, a request
		// for capacity would leave the pod without any node.
		return verdict{reason: "Bound"}
	}
	annotations := map[string]string{}
	for _, device := range slices.Sorted(maps.Keys(need.bytes)) {
		key := c.CapacityAnnotationPrefix + device
		if len(validation.IsQualifiedName(key)) > 0 {
			return verdict{reason: "InvalidDeviceClass", warnings: []string{fmt.Sprintf(
				"device class %.100q of driver %.100s cannot be part of an annotation key: the pod is scheduled without regard to capacity",
				device, c.Driver)}}
		}
		annotations[key] = strconv.FormatInt(need.bytes[device], 10)
	}
	ops := annotationOps(pod.Metadata, annotations)
	ops = append(ops, resourceOps("/spec/containers/0", pod.Spec.Containers[0].Resources, c.CapacityResource)...)
	if len(ops) == 0 {
		return verdict{reason: "UpToDate"}
	}
	return verdict{patch: ops, reason: "Counted"}
}

// parseSize parses a quantity as it is written in a template; zero if there is none.
func parseSize(raw json.RawMessage) (resource.Quantity, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return resource.Quantity{}, nil
	}
	text := string(raw)
	if raw[0] == '"' {
		if err := json.Unmarshal(raw, &text); err != nil {
			return resource.Quantity{}, err
		}
	}
	// A large exponent would keep the parser busy for minutes.
	if e := strings.IndexAny(text, "eE"); len(text) > 64 || e >= 0 && len(text)-e > 4 {
		return resource.Quantity{}, fmt.Errorf("size %.70q in a volume claim template: too long", text)
	}
	size, err := resource.ParseQuantity(text)
	if err != nil {
		return resource.Quantity{}, fmt.Errorf("size %q in a volume claim template: %w", text, err)
	}
	return size, nil
}
