package capacity

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/ptr"
)

// FindOwner is the reference that the objects get: at level 0 to pod, else level times up
// from it along the controlling owners; nil for a negative level. What it ends at is not
// read. The garbage collector deletes the objects after their owner. Reads that fail for
// no lasting reason are repeated for half a minute.
func FindOwner(ctx context.Context, client metadata.Interface, kinds discovery.ServerResourcesInterface, namespace, pod string, level int) (*metav1.OwnerReference, error) {
	if level < 0 {
		return nil, nil
	}
	owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: pod, Controller: ptr.To(true)}
	for i := 0; ; i++ {
		if i > 0 && i == level {
			return &owner, nil
		}
		var obj metav1.Object
		err := retry(ctx, func() (err error) {
			obj, err = readMetadata(ctx, client, kinds, namespace, owner)
			return err
		})
		if err != nil {
			hint := "set --capacity-ownerref-level=-1 for no owner"
			if apierrors.IsForbidden(err) {
				hint = "grant get on it to the ServiceAccount"
			}
			return nil, fmt.Errorf("finding the owner of CSIStorageCapacity objects (--capacity-ownerref-level=%d): reading %s %q in namespace %q: %w; %s", level, owner.Kind, owner.Name, namespace, err, hint)
		}
		if level == 0 {
			owner.UID = obj.GetUID()
			return &owner, nil
		}
		controller := metav1.GetControllerOfNoCopy(obj)
		if controller == nil {
			return nil, fmt.Errorf("finding the owner of CSIStorageCapacity objects (--capacity-ownerref-level=%d): %s %q in namespace %q has no controller; set a lower level, or -1 for no owner", level, owner.Kind, owner.Name, namespace)
		}
		owner = metav1.OwnerReference{APIVersion: controller.APIVersion, Kind: controller.Kind, Name: controller.Name, UID: controller.UID, Controller: ptr.To(true)}
	}
}

// readMetadata reads what ref names, of whatever kind.
func readMetadata(ctx context.Context, client metadata.Interface, kinds discovery.ServerResourcesInterface, namespace string, ref metav1.OwnerReference) (metav1.Object, error) {
	version, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return nil, err
	}
	list, err := kinds.ServerResourcesForGroupVersion(ref.APIVersion)
	if err != nil {
		return nil, fmt.Errorf("looking up the kind %s of %s: %w", ref.Kind, ref.APIVersion, err)
	}
	for _, r := range list.APIResources {
		if r.Kind == ref.Kind && r.Namespaced {
			return client.Resource(version.WithResource(r.Name)).Namespace(namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		}
	}
	return nil, apierrors.NewNotFound(version.WithResource(ref.Kind).GroupResource(), ref.Name)
}

// owners is have with owner in it as the controlling one; false when it was there. Of
// another controller it takes the place, since there can be one only; owners that do not
// control stay. A nil owner changes nothing.
func owners(have []metav1.OwnerReference, owner *metav1.OwnerReference) ([]metav1.OwnerReference, bool) {
	if owner == nil {
		return have, false
	}
	var others []metav1.OwnerReference
	for _, o := range have {
		controls := ptr.Deref(o.Controller, false)
		if controls && o.UID == owner.UID {
			return have, false
		}
		if !controls && o.UID != owner.UID {
			others = append(others, o)
		}
	}
	return append(others, *owner), true
}
