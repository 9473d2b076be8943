package capacity

import (
	"fmt"
	"hash/fnv"

	"k8s.io/apimachinery/pkg/util/validation"
)

// The labels of the objects of one publisher. The value of the second is that of
// csi-provisioner, whose objects are taken over.
const (
	labelDriver    = "csi.storage.k8s.io/drivername"
	labelManagedBy = "csi.storage.k8s.io/managed-by"
	managedByBase  = "external-provisioner"
	generateName   = "csisc-"
)

// managedBy is the value of the label managed-by. node is the name of the node of this
// instance, "" for a central deployment. What is too long for a label is cut in the way
// of csi-provisioner, so that the objects of either are those of the other.
func managedBy(node string) string {
	if node == "" {
		return managedByBase
	}
	name := managedByBase + "-" + node
	if len(name) <= validation.LabelValueMaxLength {
		return name
	}
	const hashed = len("-01234567-")
	if keep := validation.LabelValueMaxLength - hashed - len(node); keep > 0 {
		return fmt.Sprintf("%s-%s-%s", managedByBase[:keep], hash(managedByBase), node)
	}
	return managedByBase + "-" + hash(name)
}

func hash(s string) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(s)) // a hash cannot fail
	return fmt.Sprintf("%08x", h.Sum32())
}

// labels is those of every object of driver that belongs to the publisher of node.
func labels(driver, node string) map[string]string {
	return map[string]string{labelDriver: driver, labelManagedBy: managedBy(node)}
}
