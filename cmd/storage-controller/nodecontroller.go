package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// nodecontrollerSection is a name for those that the role itself refers to.
const nodecontrollerSection = "nodecontroller"

var nodecontrollerRole = role{
	section:  nodecontrollerSection,
	options:  nodecontrollerOptions,
	validate: validateNodecontroller,
	timeout:  func(s settings) time.Duration { return s.Nodecontroller.Timeout },
	lease: func(s settings, driver string) string {
		cfg, _, _ := s.Nodecontroller.Resolve(driver) // its error was one of prepareNodecontroller
		return cfg.LeaderElectionID
	},
	supported: func(d csiclient.Driver) error {
		if d.Plugin.VolumeAccessibilityConstraints {
			return nil
		}
		return fmt.Errorf("driver %q does not report the plugin capability VOLUME_ACCESSIBILITY_CONSTRAINTS, without which no volume belongs to a node", d.Name)
	},
	nameOfDriver: func(s settings) string { return s.Nodecontroller.Driver() },
	prepare:      prepareNodecontroller,
	check:        "webhook",
	build:        buildNodecontroller,
}

// prepareNodecontroller has the watches keep what this role needs of the objects.
func prepareNodecontroller(s *shared) error {
	cfg, _, err := s.settings.Nodecontroller.Resolve(s.driver.Name)
	if err != nil {
		return err
	}
	s.nodecontroller = cfg
	s.informers.Retain(cfg.Details())
	return cfg.Validate()
}

func buildNodecontroller(ctx context.Context, s *shared, restConfig *rest.Config) (controller, error) {
	if s.nodecontroller.EnableWebhooks && s.capacity != nil {
		klog.FromContext(ctx).Info("Warning: the scheduler is told of capacity twice, by CSIStorageCapacity objects and by the webhook for pods; without a scheduler extender that manages the resource of the latter, pods stay Pending. Turn off one of them: --enable-webhooks=false or --enable-capacity=false",
			"resource", s.nodecontroller.CapacityResource)
	}
	client, err := kubernetes.NewForConfig(restConfig)
	if err != nil {
		return nil, err
	}
	resources, err := dynamic.NewForConfig(kube.ForCustomResources(restConfig))
	if err != nil {
		return nil, err
	}
	// Who creates a pod waits for the webhooks, not for the rate limit of the clean-up.
	unlimited, err := unlimitedClient(restConfig)
	if err != nil {
		return nil, err
	}
	return nodecontroller.New(s.nodecontroller, nodecontroller.Deps{
		Driver:            s.driver.Name,
		Client:            client,
		Dynamic:           resources,
		Informers:         s.informers,
		Locks:             s.locks,
		Events:            s.events,
		Registry:          s.registry,
		Queues:            s.queues,
		UnthrottledClient: unlimited,
		Namespace:         election.Namespace(""), // not where the Leases were put by a flag
	})
}

// validateNodecontroller reports everything that is wrong with the settings of the role
// as far as they are known without asking the driver for its name.
func validateNodecontroller(s settings) error {
	cfg := s.Nodecontroller
	var resolve error
	if driver := cfg.Driver(); driver != "" {
		var resolved nodecontroller.Config
		if resolved, _, resolve = cfg.Resolve(driver); resolve == nil {
			cfg = resolved
		}
	}
	errs := []error{cfg.Validate()}
	if resolve != nil && cfg.Validate() == nil { // an unknown profile is an error of both
		errs = append(errs, resolve)
	}
	if deletes := cfg.Deletes(); len(deletes) > 0 && !s.Common.LeaderElection && s.mayRun(nodecontrollerSection) {
		errs = append(errs, fmt.Errorf("--leader-election: must be set with %s, or several replicas delete at the same time", strings.Join(deletes, " and ")))
	}
	if err := errors.Join(errs...); err != nil {
		return &usageError{err: err}
	}
	return nil
}

// nodecontrollerCommonOptions concern the process, and only commands that run this role
// have them: they are flags of the controller of TopoLVM.
func nodecontrollerCommonOptions() []option {
	return []option{
		{name: "csi-socket", def: "", usage: "other name of --csi-address: this program calls the driver there and serves nothing; only one of them may be set"},
		{name: "metrics-bind-address", def: "", usage: `other name of --http-endpoint; "0" or empty means none`},
		{name: "secure-metrics-server", def: false, usage: "serve metrics, pages and profiles of --http-endpoint over HTTPS with a self-signed certificate, and only to those with a token and the permission (a TokenReview and a SubjectAccessReview for each)"},
		{name: "health-probe-bind-address", def: "", usage: `address that serves /healthz, /livez and /readyz only, in plain HTTP; "0" or empty means none`},
		{name: "profiling-bind-address", def: "", usage: "address that serves profiles only; empty means none"},
		{name: "print-config", def: false, usage: "print value and origin (default, derived, profile, flag, environment or file) of every setting of the nodecontroller, and exit"},
	}
}

func nodecontrollerOptions(all bool) roleOptions {
	d := nodecontroller.DefaultConfig()
	nudge, nudgeUsage := d.ResizeNudge, "touch the pods of a volume whose file system is to grow, so that their kubelets look at once; watches all pods"
	if all {
		nudge, nudgeUsage = false, nudgeUsage+", which costs memory, so here it is off unless set"
	}
	derived := func(what string) string {
		return what + "; empty means that of the profile, else derived from the name of the driver"
	}
	return roleOptions{nodecontrollerSection, []option{
		{name: "profile", def: d.Profile, usage: "preset what is not set otherwise for a known driver: " + strings.Join(nodecontroller.ProfileNames(), ", ")},
		{name: "driver-name", def: "", usage: "name of the driver; with it, or a profile that tells it, and without --csi-address or --csi-socket, the nodecontroller alone runs without a connection to the driver"},
		{name: "nodecontroller-workers", def: d.Workers, usage: "nodes, and separately volumes and claims, that are worked on at the same time"},
		{name: "timeout", def: d.Timeout, usage: "deadline of each step"},
		{name: "retry-interval-start", def: d.RetryIntervalStart, usage: "first delay after a failure; doubles with each further one"},
		{name: "retry-interval-max", def: d.RetryIntervalMax, usage: "longest delay after a failure"},
		{name: "leader-election-id", def: "", usage: derived("name of the Lease of the nodecontroller")},
		{name: "topology-node-key", def: "", usage: "label of nodes by which volumes name theirs; empty means that of the profile, else the only key that the driver reports"},

		{name: "node-finalizer", def: "", usage: derived("finalizer that keeps a node until its volumes are cleaned up")},
		{name: "node-finalizer-mode", def: string(d.NodeFinalizerMode), usage: "off: leave the finalizer alone; remove: the driver adds it, it is taken away when the node may go; manage: it is added too"},
		{name: "node-finalizer-timeout", def: d.NodeFinalizerTimeout, usage: "longest time that the deletion of a node is held up; the clean-up goes on without it"},
		{name: "node-finalizer-wait-for-others", def: d.NodeFinalizerWaitForOthers, usage: "wait while a node that is being deleted is ready and has other finalizers: it may still be drained"},
		{name: "node-delete-grace", def: d.NodeDeleteGrace, usage: "time between the deletion of a node and the clean-up, during which that can be called off"},
		{name: "skip-node-finalize", def: d.SkipNodeFinalize, usage: "clean up nothing, as --node-cleanup=off does, which this sets; the finalizer is taken away all the same"},

		{name: "node-cleanup", def: string(d.NodeCleanup), usage: "what is done for volumes of a node that is gone: off, report (events and metrics), dry-run (and every deletion is only tried), claims (their claims are deleted), volumes (and volumes that nobody can delete any more are removed); the last two need --leader-election"},
		{name: "node-cleanup-paths", def: d.NodeCleanupPaths, usage: "which nodes are cleaned up after: finalizer (those that are being deleted and have the finalizer), orphan (those that are gone)"},
		{name: "node-cleanup-scope", def: string(d.NodeCleanupScope), usage: "opt-in: volumes whose class or claim says so by an annotation; all: all that are not excepted by one"},
		{name: "node-cleanup-unbound", def: string(d.NodeCleanupUnbound), usage: "what is done with claims that wait for a volume on a node that is gone: ignore, reschedule (another node may be chosen) or delete"},
		{name: "node-cleanup-retain", def: string(d.NodeCleanupRetain), usage: "what is done with claims whose volume is to be retained: skip, or claim (they are deleted; the volume stays in any case)"},
		{name: "node-cleanup-static", def: d.NodeCleanupStatic, usage: "with --node-cleanup=volumes: remove volumes too that the driver has not provisioned"},
		{name: "node-cleanup-out-of-service", def: d.NodeCleanupOutOfService, usage: "clean up after nodes too that are there, with the out-of-service taint and the annotation that their data are lost"},
		{name: "node-out-of-service-grace", def: d.NodeOutOfServiceGrace, usage: "time that such a node must have been out of service"},
		{name: "node-missing-grace", def: d.NodeMissingGrace, usage: "time that a node must have been gone; at least 1m"},
		{name: "node-cleanup-window", def: d.NodeCleanupWindow, usage: "time for which a node that was cleaned up counts as lost for the breaker"},
		{name: "node-cleanup-max-fraction", def: d.NodeCleanupMaxFraction, usage: "the breaker stops the clean-up when more than this part of the nodes of the driver is lost"},
		{name: "node-cleanup-min-nodes", def: d.NodeCleanupMinNodes, usage: "so many lost nodes do not stop it in any case"},
		{name: "node-cleanup-qps", def: d.NodeCleanupQPS, usage: "deletions per second"},
		{name: "node-cleanup-burst", def: d.NodeCleanupBurst, usage: "deletions that may exceed --node-cleanup-qps at once"},
		{name: "node-cleanup-resource", def: texts{}, usage: "custom resources that are cleaned up with their node, may be given several times: resource=PLURAL.VERSION.GROUP,node-field=PATH,finalizer=NAME,mark=ANNOTATION=VALUE,when=node-terminating|node-gone (the default, and the safer: a driver that is alive can clean up itself)"},
		{name: "node-cleanup-resource-sweep", def: d.NodeCleanupResourceSweep, usage: "time between two looks for such resources of nodes that are gone without any volume; 0 means never"},
		{name: "pv-release-grace", def: d.PVReleaseGrace, usage: "with --node-cleanup=volumes: time that a released volume is left to the driver before it is removed"},
		{name: "pv-removable-finalizers", def: []string{}, usage: "finalizers, separated by commas, that such a removal takes away; those of provisioner and attacher unless set"},

		{name: "pvc-finalizer", def: "", usage: derived("finalizer of claims")},
		{name: "pvc-finalizer-mode", def: string(d.PVCFinalizerMode), usage: "off; strip: take the obsolete finalizers from all claims; enforce: keep claims by the finalizer until pods that wait for them are deleted, which needs --leader-election"},
		{name: "pvc-obsolete-finalizers", def: []string{}, usage: "finalizers, separated by commas, that are taken from claims"},
		{name: "pvc-pod-deletion", def: string(d.PVCPodDeletion), usage: "with --pvc-finalizer-mode=enforce: which pods of a claim that is being deleted are deleted: none, pending (without a node), orphaned (and those whose node is gone or going) or all"},
		{name: "pvc-pod-deletion-grace", def: grace(d.PVCPodDeletionGrace), usage: "time that such a pod is given to end; -1 means its own"},
		{name: "resize-nudge", def: nudge, usage: nudgeUsage},
		{name: "resize-annotation", def: "", usage: derived("annotation of pods that is touched for that")},

		{name: "enable-webhooks", def: d.EnableWebhooks, usage: "serve admission webhooks; the profiles of TopoLVM set it"},
		{name: "webhook-addr", def: d.WebhookAddr, usage: "address of the webhooks, host:port"},
		{name: "webhook-cert-mode", def: string(d.WebhookCertMode), usage: "where their certificate comes from: files (of --cert-dir), secret (filled by somebody else) or self-signed (the leader fills the secret, and the authority into the configuration)"},
		{name: "cert-dir", def: "", usage: "directory of tls.crt and tls.key; empty means k8s-webhook-server/serving-certs in the directory for temporary files"},
		{name: "webhook-cert-secret", def: "", usage: "name of the Secret, for secret and self-signed"},
		{name: "webhook-config-name", def: "", usage: "name of the MutatingWebhookConfiguration, for self-signed"},
		{name: "webhook-service", def: "", usage: "name of the Service of the webhooks, for self-signed"},
		{name: "webhook-cluster-domain", def: d.WebhookClusterDomain, usage: "domain of the cluster, which ends the longest name in the certificate, for self-signed"},
		{name: "webhook-disable-http2", def: d.WebhookDisableHTTP2, usage: "serve the webhooks by HTTP/1.1 only"},
		{name: "webhook-optout-label", def: "", usage: derived("label by which a namespace leaves the webhooks out, as its value ignore; it has to stand in the namespaceSelector of the MutatingWebhookConfiguration, where the API server looks at it: this program does not")},
		{name: "webhook-resolve-default-class", def: d.WebhookResolveDefaultClass, usage: "take a claim without a class as one of the default class"},
		{name: "webhook-strip-foreign-capacity", def: d.WebhookStripForeignCapacity, usage: "remove capacity annotations of a pod that were not computed for it"},
		{name: "capacity-resource", def: "", usage: derived("resource that pods with volumes to come ask for")},
		{name: "capacity-annotation-prefix", def: "", usage: derived("begin, up to the slash, of the annotations that say how much they need")},
		{name: "device-class-parameter", def: "", usage: derived("parameter of StorageClasses that names the device class")},
		{name: "default-device-class", def: d.DefaultDeviceClass, usage: "device class of StorageClasses that name none"},
		{name: "default-volume-size", def: d.DefaultVolumeSize, usage: "size of claims that ask for none"},
		{name: "shutdown-delay", def: d.ShutdownDelay, usage: "time that the webhooks go on when the process is to end, until nobody sends it requests any more"},
	}}
}
