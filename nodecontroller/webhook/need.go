package webhook

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// need is how much room the volumes to come of a pod take, and what has to be read before
// that is sure.
type need struct {
	sums    map[string]int64 // bytes, by device class
	unknown []string         // claims that no cache has
	cached  []string         // claims that count, and are known from a cache only
	// missing is the classes that the cache does not have. They may have been made just
	// now, together with the claim. Those of bound claims matter only if there is
	// something to count.
	missing map[string]bool
	ofBound []string // classes
}

// addClaims counts the claims that a pod names, unless one of them is bound to a volume of
// the driver, which it tells.
func (n *need) addClaims(names []string, facts podFacts, defaultSize int64) (bound bool) {
	for _, name := range names {
		fact := facts.claims[name]
		if fact.claim == nil {
			if !fact.live {
				n.unknown = append(n.unknown, name)
			}
			continue // a pod may come before its claim, and is not counted then
		}
		class := className(fact.claim.Annotations, fact.claim.Spec.StorageClassName)
		device, ours := facts.classes.deviceOf(class)
		if !ours {
			if name := facts.classes.missing(class); name != "" && isBound(fact.claim) {
				n.ofBound = append(n.ofBound, name)
			} else if name != "" {
				n.missing[name] = true
			}
			continue
		}
		if isBound(fact.claim) {
			return true
		}
		if !fact.live {
			n.cached = append(n.cached, name)
		}
		n.add(device, bytesOf(fact.claim.Spec.Resources.Requests[corev1.ResourceStorage], defaultSize))
	}
	return false
}

// addTemplates counts the claims that ephemeral volumes are going to have.
func (n *need) addTemplates(templates []*rawTemplate, classes classes, defaultSize int64) error {
	for _, t := range templates {
		class := className(t.Metadata.Annotations, t.Spec.StorageClassName)
		device, ours := classes.deviceOf(class)
		if !ours {
			if name := classes.missing(class); name != "" {
				n.missing[name] = true
			}
			continue
		}
		size, err := parseSize(t.Spec.Resources.Requests.Storage)
		if err != nil {
			return err
		}
		n.add(device, bytesOf(size, defaultSize))
	}
	return nil
}

func (n *need) add(device string, size int64) { n.sums[device] = sum(n.sums[device], size) }

// classesToRead is the classes that may change what is counted.
func (n *need) classesToRead() []string {
	if len(n.sums) > 0 {
		for _, name := range n.ofBound {
			n.missing[name] = true
		}
	}
	return slices.Sorted(maps.Keys(n.missing))
}
