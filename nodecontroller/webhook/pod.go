package webhook

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
)

// rawPod is what is read of a pod. What is nil is absent or null.
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

// rawTemplate is what is read of the claim that an ephemeral volume is going to have.
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

// claimNames is the claims that pod names, each once. What cannot be the name of a
// claim is left out: there is none, and the API server is going to say so.
func (p *rawPod) claimNames() []string {
	var names []string
	seen := map[string]bool{}
	for _, v := range p.Spec.Volumes {
		if v.PersistentVolumeClaim == nil || seen[v.PersistentVolumeClaim.ClaimName] {
			continue
		}
		name := v.PersistentVolumeClaim.ClaimName
		seen[name] = true
		if len(validation.IsDNS1123Subdomain(name)) == 0 {
			names = append(names, name)
		}
	}
	return names
}

// templates is the claims that the ephemeral volumes of pod are going to have.
func (p *rawPod) templates() []*rawTemplate {
	var templates []*rawTemplate
	for _, v := range p.Spec.Volumes {
		if v.Ephemeral != nil && v.Ephemeral.VolumeClaimTemplate != nil {
			templates = append(templates, v.Ephemeral.VolumeClaimTemplate)
		}
	}
	return templates
}

// podFacts is everything that is looked at besides the pod.
type podFacts struct {
	claims  map[string]claimFact // by name; those that the pod names
	classes classes
}

// claimFact is a claim, or nil where there is none as far as is known.
type claimFact struct {
	claim *corev1.PersistentVolumeClaim
	live  bool // the API server said so, and not a cache
}

// verdict is what becomes of an object.
type verdict struct {
	// read is the claims that must be asked for at the API server first, and readClasses
	// the classes; nothing else is set then.
	read, readClasses []string

	patch    []operation // nil: it stays as it is
	warnings []string    // for whoever made the request
	reason   string
}

// decidePod says what becomes of pod. It has no side effects, and once all facts are
// live it asks for no more reads.
func (c Config) decidePod(pod *rawPod, facts podFacts) (verdict, error) {
	if len(pod.Spec.Containers) == 0 || pod.Spec.Containers[0] == nil {
		return verdict{reason: "NoContainers"}, nil // the API server refuses it
	}
	n := need{sums: map[string]int64{}, missing: map[string]bool{}}
	if n.addClaims(pod.claimNames(), facts, c.DefaultVolumeSize) {
		// The pod can only go where this volume is. Asking for capacity there, where
		// it may all be in use by now, would leave it without any node.
		return verdict{reason: "Bound"}, nil
	}
	if err := n.addTemplates(pod.templates(), facts.classes, c.DefaultVolumeSize); err != nil {
		return verdict{}, err
	}
	readClasses := n.classesToRead()
	switch {
	case len(n.unknown) > 0:
		return verdict{read: n.unknown, readClasses: readClasses, reason: "UnknownClaims"}, nil
	case len(readClasses) > 0:
		return verdict{readClasses: readClasses, reason: "UnknownClasses"}, nil
	case len(n.sums) == 0:
		return verdict{reason: "NoVolumes"}, nil
	}
	v := c.describe(pod, n.sums)
	if len(v.patch) > 0 && len(n.cached) > 0 {
		return verdict{read: n.cached, reason: "CachedClaims"}, nil
	}
	return v, nil
}

// describe is the patch that writes sums, by device class, on pod.
func (c Config) describe(pod *rawPod, sums map[string]int64) verdict {
	set := map[string]string{}
	for _, device := range slices.Sorted(maps.Keys(sums)) {
		key := c.CapacityAnnotationPrefix + device
		if len(validation.IsQualifiedName(key)) > 0 {
			return verdict{reason: "InvalidDeviceClass", warnings: []string{fmt.Sprintf(
				"device class %.100q of driver %.100s cannot be the name of an annotation: the pod is scheduled without regard to capacity", device, c.Driver)}}
		}
		set[key] = strconv.FormatInt(sums[device], 10)
	}
	var foreign []string
	if c.StripForeignCapacity && pod.Metadata != nil {
		for key := range pod.Metadata.Annotations {
			if _, ours := set[key]; !ours && strings.HasPrefix(key, c.CapacityAnnotationPrefix) {
				foreign = append(foreign, key)
			}
		}
	}
	ops := annotationOps(pod.Metadata, set, foreign)
	ops = append(ops, markOps("/spec/containers/0", pod.Spec.Containers[0].Resources, c.CapacityResource)...)
	if len(ops) == 0 {
		return verdict{reason: "Described"}
	}
	return verdict{patch: ops, reason: "Counted"}
}

// parseSize reads a quantity as it is written in a template; zero where there is none.
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
	// The library multiplies an exponent out, which takes for ever for a large one.
	if e := strings.IndexAny(text, "eE"); len(text) > 64 || e >= 0 && len(text)-e > 4 {
		return resource.Quantity{}, fmt.Errorf("size %.70q in a volume claim template: too long", text)
	}
	size, err := resource.ParseQuantity(text)
	if err != nil {
		return resource.Quantity{}, fmt.Errorf("size %q in a volume claim template: %w", text, err)
	}
	return size, nil
}
