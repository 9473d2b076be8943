// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package settings

// removed names what to use instead of options that no longer exist.
var removed = map[string]string{
	"dry-run":                        "the commands of the nodecontroller print a plan, and change nothing without --yes",
	"node-cleanup-out-of-service":    "delete the Node instead: it counts as lost from then on",
	"node-out-of-service-grace":      "delete the Node instead, and set --node-missing-grace",
	"node-cleanup-resource":          "run the command topolvm, which cleans up the LogicalVolumes of TopoLVM; other custom resources stay",
	"node-cleanup-resource-sweep":    "remove it, as node-cleanup-resource",
	"profile":                        "run the command topolvm in place of topolvm-controller; for other drivers, remove it",
	"pvc-pod-deletion":               "remove it: with --pvc-finalizer-mode=enforce, all pods of a deleted PVC are deleted",
	"pvc-pod-deletion-grace":         "remove it: the pods get a termination grace period of 1 s",
	"with-nodecontroller":            "run the command topolvm in place of topolvm-controller",
	"node-cleanup-paths":             "remove it, or set --node-finalizer-mode=off to clean up only after missing Nodes",
	"node-cleanup-static":            "delete PersistentVolumes by hand if the driver did not provision them",
	"node-cleanup-unbound":           "remove it: the provisioner lets the scheduler select another node",
	"pv-removable-finalizers":        "remove it: only the finalizers of the provisioner and attacher of the driver are removed",
	"webhook-cert-mode":              "mount the certificate at --cert-dir; docs/webhooks.md has an example with cert-manager",
	"webhook-cert-secret":            "mount the Secret at --cert-dir",
	"webhook-config-name":            "remove it: let cert-manager set caBundle, or set it in the MutatingWebhookConfiguration",
	"webhook-service":                "remove it",
	"webhook-strip-foreign-capacity": "remove the capacity annotations from the pod templates",
	"webhook-disable-http2":          "set the environment variable GODEBUG=http2server=0",
	"webhook-optout-label":           "set the label in the namespaceSelector of the MutatingWebhookConfiguration",
	"webhook-cluster-domain":         "remove it: the API server calls the Service by its name without a cluster domain",
	"webhook-resolve-default-class":  "remove it: the default StorageClass is always resolved",
	"default-volume-size":            "set resources.requests.storage in the PersistentVolumeClaims: the API server requires it",
}

// Replacement returns what to use instead of the option of this name, or an empty text if the option
// never existed.
func Replacement(name string) string { return removed[name] }

// unknownKey returns the text of the error about a key of a configuration file.
func unknownKey(key, option string) string {
	if instead := Replacement(option); instead != "" {
		return "key \"" + key + "\" was removed: " + instead
	}
	return "unknown key \"" + key + "\""
}
