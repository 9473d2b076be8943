// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/storage-controller/storage-controller/capacity"
	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/provisioner"
)

const capacityName = "capacity"

var capacityRole = Role{
	Name:           capacityName,
	sidecar:        "csi-provisioner",
	enabled:        func(s Settings) bool { return capacityConfig(s).Enabled },
	switches:       []string{"enable-capacity"},
	validate:       func(s Settings) error { return capacityConfig(s).Validate() },
	environment:    capacityEnvironment,
	timeout:        func(s Settings) time.Duration { return capacityConfig(s).Timeout },
	limit:          func(s Settings) (float64, int) { return capacityConfig(s).QPS, capacityConfig(s).Burst },
	nodeDeployment: func(s Settings) bool { return capacityConfig(s).NodeDeployment },
	lease:          capacityLease,
	supported: func(d csiclient.Driver) error {
		return requireCapability(d, "GET_CAPACITY", d.Controller.GetCapacity)
	},
	grants: capacityGrants,
	probe: func(ctx context.Context, s Settings, config *rest.Config) error {
		_, err := findOwner(ctx, s, config)
		return err
	},
	build: buildCapacity,
}

// capacityAlone is the role of the command capacity.
var capacityAlone = func() Role {
	r := capacityRole
	r.lease = func(_ Settings, driver string) string { return aloneLease(driver) }
	return r
}()

// capacityLease returns the Lease of the provisioner, under which csi-provisioner publishes capacity, too. A process without
// the provisioner has another: it would keep the replicas that provision from becoming leader.
func capacityLease(s Settings, driver string) string {
	if !mayRun(s, provisionerName) {
		return aloneLease(driver)
	}
	return provisioner.LeaseName(driver)
}

func aloneLease(driver string) string { return provisioner.LeaseName(driver) + "-capacity" }

// capacityConfig returns the configuration of the role with the environment.
func capacityConfig(s Settings) capacity.Config {
	cfg := s.Capacity
	cfg.NodeName = os.Getenv("NODE_NAME")
	return cfg
}

// capacityEnvironment returns an error for each environment variable that publishing requires and that is not set.
func capacityEnvironment(s Settings) error {
	var errs []error
	if os.Getenv("NAMESPACE") == "" {
		errs = append(errs, errors.New("the environment variable NAMESPACE must name the namespace of the CSIStorageCapacity objects. "+
			"Set it from metadata.namespace"))
	}
	if capacityConfig(s).OwnerRefLevel >= 0 && os.Getenv("POD_NAME") == "" {
		errs = append(errs, errors.New("the environment variable POD_NAME must name the pod of this process. "+
			"Set it from metadata.name, or set --capacity-ownerref-level=-1 for objects without an owner"))
	}
	return errors.Join(errs...)
}

func capacityGrants(s Settings, _ csiclient.Driver) []rbac.Grant {
	cfg, namespace := capacityConfig(s), os.Getenv("NAMESPACE")
	if namespace == "" {
		namespace = election.Namespace("")
	}
	grants := []rbac.Grant{{File: "capacity", Namespace: namespace}}
	if cfg.OwnerRefLevel >= 0 {
		grants = append(grants, rbac.Grant{File: "capacity-owner", Namespace: namespace})
	}
	if cfg.OwnerRefLevel >= 2 {
		grants = append(grants, rbac.Grant{File: "capacity-owner-deployment", Namespace: namespace})
	}
	if !cfg.NodeDeployment {
		grants = append(grants, rbac.Grant{File: "capacity-topology"})
	}
	return grants
}

// findOwner reads the owner of the CSIStorageCapacity objects.
func findOwner(ctx context.Context, s Settings, config *rest.Config) (*metav1.OwnerReference, error) {
	client, meta, err := kube.NewClients(config) // with a timeout, unlike those of the watches
	if err != nil {
		return nil, err
	}
	return capacity.FindOwner(ctx, meta, client.Discovery(), os.Getenv("NAMESPACE"), os.Getenv("POD_NAME"), capacityConfig(s).OwnerRefLevel)
}

func buildCapacity(ctx context.Context, s *shared, config *rest.Config) (controller, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	cfg := capacityConfig(s.settings)
	deps := capacity.Deps{
		Driver:    s.driver,
		Client:    client,
		Informers: s.informers,
		CSI:       s.csi.Controller(),
		Ready:     s.csi.WaitReady,
		Registry:  s.registry,
		Queues:    s.queues,
		Namespace: os.Getenv("NAMESPACE"),
	}
	if deps.Owner, err = findOwner(ctx, s.settings, config); err != nil {
		return nil, err
	}
	if cfg.NodeDeployment {
		node, err := s.csi.NodeInfo(ctx)
		if err != nil {
			return nil, err
		}
		deps.Topology = node.GetAccessibleTopology().GetSegments()
	}
	c, err := capacity.New(cfg, deps)
	if err != nil {
		return nil, err
	}
	s.running.capacity.Store(c)
	return c, nil
}

// volumeObserver passes what the provisioner reports on to the capacity role, while that runs here.
type volumeObserver struct{ *running }

func (o volumeObserver) VolumeProvisioned(pv *corev1.PersistentVolume) {
	if c := o.capacity.Load(); c != nil {
		c.VolumeProvisioned(pv)
	}
}

func (o volumeObserver) VolumeNotProvisioned(class string) {
	if c := o.capacity.Load(); c != nil {
		c.VolumeNotProvisioned(class)
	}
}

func (o volumeObserver) VolumeDeleted(pv *corev1.PersistentVolume) {
	if c := o.capacity.Load(); c != nil {
		c.VolumeDeleted(pv)
	}
}
