package main

import (
	"os"
	"slices"
	"strings"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// features is what decides which permissions and kinds a process needs.
type features struct {
	settings       settings
	driver         csiclient.Driver
	known          bool
	nodecontroller nodecontroller.Config // resolved where the driver is known
	chosen         []role
}

func (f features) runs(r role) bool { return having(f.chosen, r.section) }
func (f features) gate(name string) bool {
	return f.settings.Common.FeatureGates.enabled(name)
}

// grants is the files of deploy/rbac that a process with these features needs. Those for
// secrets depend on the StorageClasses and are not among them.
func (f features) grants(leases string) []doctor.Grant {
	var grants []doctor.Grant
	add := func(needed bool, g doctor.Grant) {
		if needed {
			grants = append(grants, g)
		}
	}
	elects := f.settings.Common.LeaderElection
	if f.runs(provisionerRole) {
		caps, node := f.driver.Controller, f.settings.Provisioner.NodeDeployment
		add(true, doctor.Grant{File: "provisioner"})
		add(elects, doctor.Grant{File: "provisioner-leader-election", Namespace: leases})
		add(caps.PublishUnpublishVolume, doctor.Grant{File: "provisioner-attachments"})
		add(f.driver.Plugin.VolumeAccessibilityConstraints && f.gate("Topology") && !node, doctor.Grant{File: "provisioner-topology"})
		add(caps.CreateDeleteSnapshot, doctor.Grant{File: "provisioner-snapshots", Without: "volumes are not restored from snapshots, or notice these late"})
		add(caps.ModifyVolume && f.gate("VolumeAttributesClass"), doctor.Grant{File: "provisioner-volumeattributesclasses", Without: "claims with a VolumeAttributesClass fail, or notice it late"})
		add(f.gate("CrossNamespaceVolumeDataSource"), doctor.Grant{File: "provisioner-cross-namespace"})
	}
	if f.runs(attacherRole) {
		add(true, doctor.Grant{File: "attacher"})
		add(elects, doctor.Grant{File: "attacher-leader-election", Namespace: leases})
	}
	if f.runs(capacityRole) {
		level, namespace := f.settings.Capacity.OwnerRefLevel, os.Getenv("NAMESPACE")
		if namespace == "" {
			namespace = election.Namespace("")
		}
		add(true, doctor.Grant{File: "capacity", Namespace: namespace})
		add(elects && !f.runs(provisionerRole), doctor.Grant{File: "capacity-leader-election", Namespace: leases})
		add(level >= 0, doctor.Grant{File: "capacity-owner", Namespace: namespace})
		add(level >= 2, doctor.Grant{File: "capacity-owner-deployment", Namespace: namespace})
		add(!f.settings.Capacity.NodeDeployment, doctor.Grant{File: "capacity-topology"})
	}
	if f.runs(nodecontrollerRole) {
		add(true, doctor.Grant{File: "nodecontroller"})
		add(elects, doctor.Grant{File: "nodecontroller-leader-election", Namespace: leases})
		grants = append(grants, f.nodecontrollerGrants()...)
	}
	add(f.settings.Common.SecureMetrics, doctor.Grant{File: "nodecontroller-secure-metrics"})
	return grants
}

// nodecontrollerGrants is those of the features of that role.
func (f features) nodecontrollerGrants() []doctor.Grant {
	c := f.nodecontroller
	var grants []doctor.Grant
	add := func(needed bool, g doctor.Grant) {
		if needed {
			grants = append(grants, g)
		}
	}
	add(c.NodeFinalizerMode != nodecontroller.NodeFinalizerOff, doctor.Grant{File: "nodecontroller-node-finalizer"})
	add(slices.Contains([]nodecontroller.CleanupMode{nodecontroller.CleanupDryRun, nodecontroller.CleanupClaims, nodecontroller.CleanupVolumes}, c.NodeCleanup),
		doctor.Grant{File: "nodecontroller-cleanup"})
	add(c.NodeCleanup == nodecontroller.CleanupVolumes, doctor.Grant{File: "nodecontroller-cleanup-volumes"})
	add(c.NodeCleanupUnbound == nodecontroller.UnboundReschedule, doctor.Grant{File: "nodecontroller-cleanup-unbound"})
	for _, text := range c.NodeCleanupResource {
		if r, err := nodecontroller.ParseResource(text); err == nil { // else an error of the settings
			add(true, doctor.Grant{File: "nodecontroller-custom-resources", Rules: []doctor.Rule{
				{Groups: []string{r.Resource.Group}, Resources: []string{r.Resource.Resource}, Verbs: []string{"list", "patch", "delete"}},
			}})
		}
	}
	enforce := doctor.Grant{File: "nodecontroller-pvc-enforce"}
	if c.PVCPodDeletion == nodecontroller.PodsNone {
		enforce.Rules = withoutResource(doctor.Rules(enforce.File), "pods")
	}
	add(c.PVCFinalizerMode == nodecontroller.ClaimEnforce, enforce)
	add(c.PVCFinalizerMode == nodecontroller.ClaimStrip, doctor.Grant{File: "nodecontroller-pvc-strip"})
	add(c.ResizeNudge, doctor.Grant{File: "nodecontroller-resize-nudge"})
	certificates := doctor.Grant{
		File: "nodecontroller-webhook-certificates", Namespace: election.Namespace(""),
		Names: map[string]string{"storage-controller-webhook-certificates": c.WebhookCertSecret, "storage-controller-webhooks": c.WebhookConfigName},
	}
	if c.WebhookCertMode == nodecontroller.CertSecret {
		certificates.Rules = []doctor.Rule{{Namespaced: true, Groups: []string{""}, Resources: []string{"secrets"}, Names: []string{c.WebhookCertSecret}, Verbs: []string{"watch"}}}
	}
	add(c.EnableWebhooks && c.WebhookCertMode != nodecontroller.CertFiles, certificates)
	return grants
}

func withoutResource(rules []doctor.Rule, resource string) []doctor.Rule {
	return slices.DeleteFunc(slices.Clone(rules), func(r doctor.Rule) bool { return slices.Contains(r.Resources, resource) })
}

// apis is the kinds that may be missing, of those that the features need.
func (f features) apis() []doctor.API {
	var apis []doctor.API
	if f.runs(provisionerRole) && f.driver.Controller.CreateDeleteSnapshot {
		for _, resource := range []string{"volumesnapshots", "volumesnapshotcontents"} {
			apis = append(apis, doctor.API{
				GroupVersion: "snapshot.storage.k8s.io/v1", Resource: resource, For: "restoring snapshots",
				Hint: "install the kinds of external-snapshotter, if snapshots are wanted",
			})
		}
	}
	if f.runs(provisionerRole) && f.gate("CrossNamespaceVolumeDataSource") {
		apis = append(apis, doctor.API{
			GroupVersion: "gateway.networking.k8s.io/v1beta1", Resource: "referencegrants", For: "sources in other namespaces (the feature gate CrossNamespaceVolumeDataSource)", Required: true,
			Hint: "install ReferenceGrant of the Gateway API, or turn the feature gate off",
		})
	}
	if f.runs(provisionerRole) && f.driver.Controller.ModifyVolume && f.gate("VolumeAttributesClass") {
		apis = append(apis, doctor.API{
			GroupVersion: "storage.k8s.io/v1", Resource: "volumeattributesclasses", For: "VolumeAttributesClasses of new volumes",
			Required: f.settings.Common.FeatureGates["VolumeAttributesClass"],
			Hint:     "use Kubernetes 1.34 or later, if they are wanted",
		})
	}
	if f.runs(nodecontrollerRole) {
		for _, text := range f.nodecontroller.NodeCleanupResource {
			if r, err := nodecontroller.ParseResource(text); err == nil {
				apis = append(apis, doctor.API{
					GroupVersion: strings.TrimPrefix(r.Resource.GroupVersion().String(), "/"), Resource: r.Resource.Resource, For: "cleaning it up after nodes (--node-cleanup-resource)",
					Hint: "install the kind, or correct --node-cleanup-resource",
				})
			}
		}
	}
	return apis
}
