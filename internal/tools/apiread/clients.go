// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package apiread

import (
	"errors"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/clock"
)

// Clients read a cluster.
type Clients struct {
	Kubernetes kubernetes.Interface
	Dynamic    dynamic.Interface  // for custom resources
	Metadata   metadata.Interface // for kinds of which nothing else is needed, and for Secrets
	Clock      *clock.Clock       // that their responses set
}

// NewClients returns the clients for cfg.
func NewClients(cfg *rest.Config) (c Clients, _ error) {
	c.Clock = new(clock.Clock)
	cfg = rest.CopyConfig(cfg)
	cfg.Wrap(c.Clock.Observe)
	var err, errDynamic, errMetadata error
	c.Kubernetes, err = kubernetes.NewForConfig(cfg)
	c.Dynamic, errDynamic = dynamic.NewForConfig(kube.ForCustomResources(cfg))
	c.Metadata, errMetadata = metadata.NewForConfig(cfg)
	return c, errors.Join(err, errDynamic, errMetadata)
}

const snapshotGroup = "snapshot.storage.k8s.io"

// Resources without a typed client.
var (
	Snapshots        = schema.GroupVersionResource{Group: snapshotGroup, Version: "v1", Resource: "volumesnapshots"}
	SnapshotContents = schema.GroupVersionResource{Group: snapshotGroup, Version: "v1", Resource: "volumesnapshotcontents"}
	SnapshotClasses  = schema.GroupVersionResource{Group: snapshotGroup, Version: "v1", Resource: "volumesnapshotclasses"}
)
