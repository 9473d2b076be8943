// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"slices"

	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// nodecontrollerCommonOptions are flags of topolvm-controller that concern the whole process.
var nodecontrollerCommonOptions = []settings.Option{
	{Name: "csi-socket", Default: "",
		Usage: "alias of --csi-address: the socket of the driver, which this program calls; only one of them may be set"},
	{Name: "metrics-bind-address", Default: "", Usage: `alias of --http-endpoint; "0" or empty means none`},
	{Name: "secure-metrics-server", Default: false,
		Usage: "serve metrics, debug endpoints and profiles of --http-endpoint over HTTPS with a self-signed certificate, " +
			"to clients with a bearer token and the permission (checked by TokenReview and SubjectAccessReview)"},
	{Name: "health-probe-bind-address", Default: "",
		Usage: `address that serves only /healthz, /livez and /readyz, in plain HTTP; "0" or empty means none`},
	{Name: "profiling-bind-address", Default: "", Usage: "address that serves only profiles; empty means none"},
	{Name: "print-config", Default: false,
		Usage: "print value and origin (default, derived, flag, environment or file) of every setting of the " +
			"nodecontroller, and exit"},
}

// nodecontrollerOptions returns the options of the role.
func nodecontrollerOptions(all bool) []settings.Option {
	d := nodecontroller.DefaultConfig()
	return slices.Concat(nodeOptions(d), nodeFinalizerOptions(d), nodeCleanupOptions(d), volumeCleanupOptions(d), claimOptions(d, all),
		webhookOptions(d))
}

// orDerived completes the help text of a name that depends on the driver.
func orDerived(usage string) string {
	return usage + "; empty means one derived from the name of the driver"
}

// nodeOptions returns the options of the role as a whole.
func nodeOptions(d nodecontroller.Config) []settings.Option {
	return slices.Concat([]settings.Option{
		{Name: "driver-name", Default: "",
			Usage: "name of the CSI driver. With it, and without --csi-address and --csi-socket, " +
				"the nodecontroller as the only role runs without a connection to the driver"},
		{Name: "nodecontroller-workers", Default: d.Workers,
			Usage: "number of Nodes, and separately of PersistentVolumes and PersistentVolumeClaims, that are reconciled at the same time"},
	}, retryOptions(d.Timeout, d.RetryIntervalStart, d.RetryIntervalMax,
		"timeout of each request to the API server, or of a read together with the deletion that depends on it"), []settings.Option{
		{Name: "leader-election-id", Default: "", Usage: orDerived("name of the Lease of the nodecontroller")},
		{Name: "topology-node-key", Default: "", Usage: "node label that identifies the node in the node affinity of a volume; " +
			"empty means that of TopoLVM, or the only topology key that the driver reports"},
	})
}

// nodeFinalizerOptions returns the options of the finalizer of nodes.
func nodeFinalizerOptions(d nodecontroller.Config) []settings.Option {
	return []settings.Option{
		{Name: "node-finalizer", Default: "", Usage: orDerived("finalizer that keeps a Node until its volumes are cleaned up")},
		{Name: "node-finalizer-mode", Default: string(d.NodeFinalizerMode),
			Usage: "off: ignore the finalizer; remove: remove it from a deleted Node after the cleanup, the driver adds it; manage: " +
				"also add it"},
		{Name: "node-finalizer-timeout", Default: d.NodeFinalizerTimeout,
			Usage: "maximum time that the finalizer delays the deletion of a Node; the cleanup continues without it"},
		{Name: "node-finalizer-wait-for-others", Default: d.NodeFinalizerWaitForOthers,
			Usage: "wait while a Node that is being deleted is ready and has other finalizers: it may still be drained"},
		{Name: "node-delete-grace", Default: d.NodeDeleteGrace,
			Usage: "time between the deletion of a Node and the cleanup, during which the cleanup can be canceled"},
		{Name: "skip-node-finalize", Default: d.SkipNodeFinalize,
			Usage: "clean up nothing: sets --node-cleanup=off; the finalizer of Nodes is still removed"},
	}
}

// nodeCleanupOptions returns the options of the cleanup after lost nodes.
func nodeCleanupOptions(d nodecontroller.Config) []settings.Option {
	return []settings.Option{
		{Name: "node-cleanup", Default: string(d.NodeCleanup),
			Usage: "cleanup of volumes whose node was deleted: off; report (events and metrics only); " +
				"claims (delete their PVCs); volumes (also remove PVs that no driver can delete any more). " +
				"claims and volumes require --leader-election"},
		{Name: "node-cleanup-scope", Default: string(d.NodeCleanupScope),
			Usage: "opt-in: volumes whose StorageClass or PVC opts in by an annotation; all: all volumes except those that opt out"},
		{Name: "node-cleanup-retain", Default: string(d.NodeCleanupRetain),
			Usage: "action for PVCs of volumes with reclaim policy Retain: skip, or claim (delete the PVC; the volume is always kept)"},
		{Name: "node-missing-grace", Default: d.NodeMissingGrace, Usage: "minimum time that a Node must have been missing; at least 1m"},
		{Name: "node-cleanup-window", Default: d.NodeCleanupWindow,
			Usage: "how long a node that was cleaned up counts as lost for the breaker"},
		{Name: "node-cleanup-max-fraction", Default: d.NodeCleanupMaxFraction,
			Usage: "fraction of the driver's nodes; the breaker stops the cleanup when more nodes are lost"},
		{Name: "node-cleanup-min-nodes", Default: d.NodeCleanupMinNodes,
			Usage: "number of lost nodes that never opens the breaker, regardless of --node-cleanup-max-fraction"},
		{Name: "node-cleanup-qps", Default: d.NodeCleanupQPS,
			Usage: "maximum deletions per second for missing Nodes without an approval; a Node that is being deleted has no limit"},
		{Name: "node-cleanup-burst", Default: d.NodeCleanupBurst, Usage: "number of deletions that may exceed --node-cleanup-qps at once"},
	}
}

// volumeCleanupOptions returns the options of the cleanup of PersistentVolumes.
func volumeCleanupOptions(d nodecontroller.Config) []settings.Option {
	return []settings.Option{
		{Name: "pv-release-grace", Default: d.PVReleaseGrace,
			Usage: "with --node-cleanup=volumes: how long the driver may take to delete a released volume before its PV is removed"},
	}
}

// claimOptions returns the options of PersistentVolumeClaims and their pods.
func claimOptions(d nodecontroller.Config, all bool) []settings.Option {
	nudge, nudgeUsage := d.ResizeNudge, "update the pods of a volume whose file system must grow, so that the kubelet expands it at "+
		"once; watches all pods"
	if all {
		nudge, nudgeUsage = false, nudgeUsage+", which costs memory"
	}
	return []settings.Option{
		{Name: "pvc-finalizer", Default: "", Usage: orDerived("finalizer of PVCs")},
		{Name: "pvc-finalizer-mode", Default: string(d.PVCFinalizerMode),
			Usage: "off; strip: remove the obsolete finalizers from all PVCs; " +
				"enforce: keep a deleted PVC by the finalizer until all pods that use it are deleted, for TopoLVM up to v0.39 only; " +
				"requires --leader-election"},
		{Name: "pvc-obsolete-finalizers", Default: []string{}, Usage: "finalizers, separated by commas, that are removed from PVCs"},
		{Name: "resize-nudge", Default: nudge, Usage: nudgeUsage},
		{Name: "resize-annotation", Default: "", Usage: orDerived("pod annotation that is updated for this")},
	}
}

// webhookOptions returns the options of the admission webhooks.
func webhookOptions(d nodecontroller.Config) []settings.Option {
	return []settings.Option{
		{Name: "enable-webhooks", Default: d.EnableWebhooks, Usage: "serve admission webhooks"},
		{Name: "webhook-addr", Default: d.WebhookAddr, Usage: "address of the webhooks, host:port"},
		{Name: "cert-dir", Default: "",
			Usage: "directory of tls.crt and tls.key; empty means k8s-webhook-server/serving-certs in the directory for temporary files"},
		{Name: "webhook-client-ca", Default: "", Usage: "file with the CA certificates of the API servers' client certificates; " +
			"other clients are rejected. Empty: every client is served"},
		{Name: "capacity-resource", Default: "", Usage: orDerived("extended resource that pods with unprovisioned volumes request")},
		{Name: "capacity-annotation-prefix", Default: "",
			Usage: orDerived("prefix, including the slash, of the pod annotations that hold the requested bytes")},
		{Name: "device-class-parameter", Default: "", Usage: orDerived("StorageClass parameter that names the device class")},
		{Name: "default-device-class", Default: d.DefaultDeviceClass, Usage: "device class of StorageClasses that do not name one"},
		{Name: "shutdown-delay", Default: d.ShutdownDelay,
			Usage: "how long the webhooks keep serving after SIGTERM, so that the API server stops sending requests first"},
	}
}
