package webhook

import (
	"math"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Annotations of the class that claims without one get.
const (
	annDefaultClass     = "storageclass.kubernetes.io/is-default-class"
	annBetaDefaultClass = "storageclass.beta.kubernetes.io/is-default-class"
)

// classes is what is known of the StorageClasses.
type classes struct {
	// device is the device class of each class of the driver, by name.
	device map[string]string
	// others is the other names of which it is known that they are none of the driver.
	others map[string]bool
	// standard is the class of claims without one; nil when there is none, or when
	// claims without a class are left alone.
	standard *string
}

func (c Config) classesOf(list []*storagev1.StorageClass) classes {
	known := classes{device: map[string]string{}, others: map[string]bool{}}
	var standard *storagev1.StorageClass
	for _, class := range list {
		c.note(known, class.Name, class)
		if c.ResolveDefaultClass && isDefault(class) && (standard == nil || precedes(class, standard)) {
			standard = class
		}
	}
	if standard != nil {
		known.standard = &standard.Name
	}
	return known
}

// note adds what is known of the class called name, which is nil where there is none.
func (c Config) note(known classes, name string, class *storagev1.StorageClass) {
	if class == nil || class.Provisioner != c.Driver {
		known.others[name] = true
		return
	}
	device := class.Parameters[c.DeviceClassParameter]
	if device == "" { // the driver takes an empty parameter for the default, too
		device = c.DefaultDeviceClass
	}
	known.device[name] = device
}

func isDefault(class *storagev1.StorageClass) bool {
	return class.Annotations[annDefaultClass] == "true" || class.Annotations[annBetaDefaultClass] == "true"
}

// precedes tells whether Kubernetes would take a for the default rather than b: the
// newest, and of those the first by name.
func precedes(a, b *storagev1.StorageClass) bool {
	if a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return a.Name < b.Name
	}
	return b.CreationTimestamp.Before(&a.CreationTimestamp)
}

// deviceOf is the device class behind the name of a class, which is nil for a claim
// that has none and "" for one that shall have none; false where the class is not one
// of the driver, or not there.
func (c classes) deviceOf(name *string) (string, bool) {
	if name == nil {
		name = c.standard
	}
	if name == nil {
		return "", false
	}
	device, ok := c.device[*name]
	return device, ok && *name != ""
}

// missing is the name of a class of which nothing is known yet; "" for any other, and for
// what cannot be the name of one.
func (c classes) missing(name *string) string {
	if name == nil || c.others[*name] || len(validation.IsDNS1123Subdomain(*name)) > 0 {
		return ""
	}
	if _, ok := c.device[*name]; ok {
		return ""
	}
	return *name
}

// className is what a claim, or the template of one, says about its class.
func className(annotations map[string]string, field *string) *string {
	if name, ok := annotations[corev1.BetaStorageClassAnnotation]; ok {
		return &name
	}
	return field
}

// isBound tells whether pvc has a volume, or is promised one.
func isBound(pvc *corev1.PersistentVolumeClaim) bool {
	return pvc.Status.Phase != corev1.ClaimPending || pvc.Spec.VolumeName != ""
}

// bytesOf is a requested size in whole bytes, rounded up, and at most what fits;
// without one, fallback.
func bytesOf(size resource.Quantity, fallback int64) int64 {
	switch {
	case size.Sign() <= 0:
		return fallback
	case size.AsApproximateFloat64() >= math.MaxInt64: // of which Value would be anything
		return math.MaxInt64
	}
	return size.Value()
}

// sum is a + b of sizes, at most what fits.
func sum(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}
