// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"context"
	"errors"
	"slices"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	storagev1beta1 "k8s.io/api/storage/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	typedv1beta1 "k8s.io/client-go/kubernetes/typed/storage/v1beta1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// Beta reports whether the API server serves CSIStorageCapacity only as v1beta1, as
// Kubernetes does up to 1.23. It retries transient errors.
func Beta(ctx context.Context, client discovery.DiscoveryInterface) (bool, error) {
	var beta bool
	err := retry(ctx, func() error {
		for _, version := range []schema.GroupVersion{storagev1.SchemeGroupVersion, storagev1beta1.SchemeGroupVersion} {
			resources, err := kube.ServerResources(ctx, client, version)
			if err != nil && !apierrors.IsNotFound(err) {
				return err
			}
			if slices.ContainsFunc(resources, func(r metav1.APIResource) bool { return r.Name == "csistoragecapacities" }) {
				beta = version == storagev1beta1.SchemeGroupVersion
				return nil
			}
		}
		return errNotServed
	})
	return beta, err
}

var errNotServed = errors.New(
	"the API server serves CSIStorageCapacity neither in storage.k8s.io/v1 nor in v1beta1. Use Kubernetes 1.21 or later",
)

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
		case errors.Is(last, errNotServed), kube.IsNotFound(last),
			apierrors.IsForbidden(last), apierrors.IsUnauthorized(last), apierrors.IsBadRequest(last):
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

// objectClient declares the methods of the typed client for the objects of one namespace.
type objectClient interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*storagev1.CSIStorageCapacity, error)
	Create(ctx context.Context, obj *storagev1.CSIStorageCapacity, opts metav1.CreateOptions) (*storagev1.CSIStorageCapacity, error)
	Update(ctx context.Context, obj *storagev1.CSIStorageCapacity, opts metav1.UpdateOptions) (*storagev1.CSIStorageCapacity, error)
	Patch(
		ctx context.Context, name string, pt types.PatchType, data []byte, opts metav1.PatchOptions, subresources ...string,
	) (*storagev1.CSIStorageCapacity, error)
	Delete(ctx context.Context, name string, opts metav1.DeleteOptions) error
}

func newObjectClient(client kubernetes.Interface, namespace string, beta bool) objectClient {
	if beta {
		return betaClient{client.StorageV1beta1().CSIStorageCapacities(namespace)}
	}
	return client.StorageV1().CSIStorageCapacities(namespace)
}

// betaClient converts between v1 and v1beta1.
type betaClient struct {
	client typedv1beta1.CSIStorageCapacityInterface
}

func (b betaClient) Get(ctx context.Context, name string, opts metav1.GetOptions) (*storagev1.CSIStorageCapacity, error) {
	return fromBeta(b.client.Get(ctx, name, opts))
}

func (b betaClient) Create(ctx context.Context, obj *storagev1.CSIStorageCapacity, opts metav1.CreateOptions) (
	*storagev1.CSIStorageCapacity, error) {
	return fromBeta(b.client.Create(ctx, toBeta(obj), opts))
}

func (b betaClient) Update(ctx context.Context, obj *storagev1.CSIStorageCapacity, opts metav1.UpdateOptions) (
	*storagev1.CSIStorageCapacity, error) {
	return fromBeta(b.client.Update(ctx, toBeta(obj), opts))
}

func (b betaClient) Patch(
	ctx context.Context, name string, pt types.PatchType, data []byte, opts metav1.PatchOptions, subresources ...string,
) (*storagev1.CSIStorageCapacity, error) {
	return fromBeta(b.client.Patch(ctx, name, pt, data, opts, subresources...))
}

func (b betaClient) Delete(ctx context.Context, name string, opts metav1.DeleteOptions) error {
	return b.client.Delete(ctx, name, opts)
}

func fromBeta(obj *storagev1beta1.CSIStorageCapacity, err error) (*storagev1.CSIStorageCapacity, error) {
	if err != nil {
		return nil, err
	}
	return kube.CapacityFromBeta(obj), nil
}

func toBeta(obj *storagev1.CSIStorageCapacity) *storagev1beta1.CSIStorageCapacity {
	return &storagev1beta1.CSIStorageCapacity{
		ObjectMeta: obj.ObjectMeta, NodeTopology: obj.NodeTopology, StorageClassName: obj.StorageClassName,
		Capacity: obj.Capacity, MaximumVolumeSize: obj.MaximumVolumeSize,
	}
}
