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
	for _, v := range p.Spec.Volumes {
		if v.PersistentVolumeClaim == nil {
			continue
		}
		name := v.PersistentVolumeClaim.ClaimName
		if len(validation.IsDNS1123Subdomain(name)) == 0 && !slices.Contains(names, name) {
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

// mutatePod adds the capacity of its unbound claims to a pod.
func (s *Server) mutatePod(ctx context.Context, r *request) (verdict, error) {
	pod := &rawPod{}
	if err := decode(r.Object, pod); err != nil {
		return verdict{}, badRequest("decoding the pod: %w", err)
	}
	if len(pod.Spec.Volumes) == 0 {
		return verdict{reason: "NoVolumes"}, nil
	}
	if err := s.synced(); err != nil {
		return verdict{}, err // a class that is not cached yet would look like one of another driver
	}
	l := s.newLookup(ctx, r.Namespace)
	if err := l.find(pod.claimNames()); err != nil {
		return verdict{}, err
	}
	need, err := capacityOf(pod, l, s.cfg.DefaultVolumeSize)
	if err != nil {
		return verdict{}, err
	}
	v := s.cfg.describe(pod, need)
	if len(v.patch) == 0 {
		return v, nil
	}
	// The cache may be stale: a claim that is bound by now has its capacity already.
	if err := l.confirm(need.claims); err != nil {
		return verdict{}, err
	}
	if need, err = capacityOf(pod, l, s.cfg.DefaultVolumeSize); err != nil {
		return verdict{}, err
	}
	return s.cfg.describe(pod, need), nil
}

// capacity is what the volumes of a pod need that do not exist yet.
type capacity struct {
	bytes  map[string]int64 // by device class
	claims []string         // that were counted
	bound  bool             // one claim is bound to a volume of the driver
}

// source provides the claims and StorageClasses of a pod.
type source interface {
	claim(name string) *corev1.PersistentVolumeClaim
	deviceClass(class *string) (string, error)
}

// capacityOf adds up the unbound claims of pod and the claims of its ephemeral volumes. The classes
// of bound claims are looked up only if there is something to patch.
func capacityOf(pod *rawPod, from source, defaultSize int64) (capacity, error) {
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
			need.add(device, bytesOf(claim.Spec.Resources.Requests[corev1.ResourceStorage], defaultSize))
		}
	}
	if err := need.addTemplates(pod, from, defaultSize); err != nil || len(need.bytes) == 0 {
		return need, err
	}
	for _, claim := range bound {
		device, err := from.deviceClass(className(claim.Annotations, claim.Spec.StorageClassName))
		if err != nil {
			return need, err
		}
		need.bound = need.bound || device != ""
	}
	return need, nil
}

// addTemplates adds the claims that the ephemeral volumes of pod are going to have.
func (c *capacity) addTemplates(pod *rawPod, from source, defaultSize int64) error {
	for _, v := range pod.Spec.Volumes {
		if v.Ephemeral == nil || v.Ephemeral.VolumeClaimTemplate == nil {
			continue
		}
		t := v.Ephemeral.VolumeClaimTemplate
		device, err := from.deviceClass(className(t.Metadata.Annotations, t.Spec.StorageClassName))
		if err != nil {
			return err
		}
		if device == "" {
			continue
		}
		size, err := parseSize(t.Spec.Resources.Requests.Storage)
		if err != nil {
			return badRequest("decoding the pod: %w", err)
		}
		c.add(device, bytesOf(size, defaultSize))
	}
	return nil
}

// add adds size, up to what fits.
func (c *capacity) add(device string, size int64) {
	if have := c.bytes[device]; have > math.MaxInt64-size {
		size = math.MaxInt64 - have
	}
	c.bytes[device] += size
}

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

// bytesOf returns size in bytes, rounded up, at most what fits; without a size, fallback.
func bytesOf(size resource.Quantity, fallback int64) int64 {
	switch {
	case size.Sign() <= 0:
		return fallback
	case size.AsApproximateFloat64() >= math.MaxInt64: // where the result of Value is undefined
		return math.MaxInt64
	}
	return size.Value()
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
