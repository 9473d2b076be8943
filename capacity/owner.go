// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// FindOwner returns the owner reference of the objects: pod at level 0, else its controlling
// owner level steps up; nil for a negative level. The last owner itself is not read. The
// garbage collector deletes the objects after their owner. FindOwner retries reads with a
// transient error.
func FindOwner(
	ctx context.Context, client metadata.Interface, kinds discovery.DiscoveryInterface, namespace, pod string, level int,
) (*metav1.OwnerReference, error) {
	owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: pod, Controller: ptr.To(true)}
	for i := 0; i <= level; i++ {
		if i > 0 && i == level {
			return &owner, nil
		}
		var obj metav1.Object
		err := retry(ctx, func() (err error) {
			obj, err = readMetadata(ctx, client, kinds, namespace, owner)
			return err
		})
		fail := func(cause error, instruction string) error {
			const format = "finding the owner of CSIStorageCapacity objects (--capacity-ownerref-level=%d): " +
				"%s %q in namespace %q: %w. %s"
			return fmt.Errorf(format, level, owner.Kind, owner.Name, namespace, cause, instruction)
		}
		switch {
		case apierrors.IsForbidden(err):
			return nil, fail(err, "Grant get on it to the ServiceAccount")
		case err != nil:
			return nil, fail(err, "Set --capacity-ownerref-level=-1 for no owner")
		case level == 0:
			owner.UID = obj.GetUID()
			return &owner, nil
		}
		controller := metav1.GetControllerOfNoCopy(obj)
		if controller == nil {
			return nil, fail(errors.New("has no controlling owner reference"), "Set a lower level, or -1 for no owner")
		}
		owner = metav1.OwnerReference{
			APIVersion: controller.APIVersion, Kind: controller.Kind, Name: controller.Name, UID: controller.UID,
			Controller: ptr.To(true),
		}
	}
	return nil, nil
}

// readMetadata reads the object that ref names.
func readMetadata(
	ctx context.Context, client metadata.Interface, kinds discovery.DiscoveryInterface, namespace string, ref metav1.OwnerReference,
) (metav1.Object, error) {
	version, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return nil, err
	}
	resources, err := kube.ServerResources(ctx, kinds, version)
	if err != nil {
		return nil, fmt.Errorf("discovering kind %s of %s: %w", ref.Kind, ref.APIVersion, err)
	}
	for _, r := range resources {
		if r.Kind == ref.Kind && r.Namespaced {
			return client.Resource(version.WithResource(r.Name)).Namespace(namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		}
	}
	return nil, apierrors.NewNotFound(version.WithResource(ref.Kind).GroupResource(), ref.Name)
}

// answers is the number of transient errors of the API server, over half a minute, after which retry gives up.
const answers = 8

// retry repeats f with back-off while it returns a transient error, and returns the last one. It gives up when ctx ends and, so
// that the other roles start, after some responses of the API server. Without a response, no role can work.
func retry(ctx context.Context, f func() error) error {
	pause := wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Cap: 10 * time.Second, Steps: 100}
	var last error
	answered := 0
	err := pause.DelayFunc().Until(ctx, true, true, func(context.Context) (bool, error) {
		last = f()
		switch {
		case last == nil:
			return true, nil
		case kube.IsNotFound(last), apierrors.IsForbidden(last), apierrors.IsUnauthorized(last), apierrors.IsBadRequest(last):
			return false, last
		}
		var response apierrors.APIStatus
		if errors.As(last, &response) {
			answered++
			if answered == answers {
				return false, last
			}
		}
		klog.FromContext(ctx).Info("Starting the capacity role waits for the API server", "err", last)
		return false, nil
	})
	if err != nil && last != nil {
		return last
	}
	return err
}
