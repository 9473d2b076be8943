package nodecontroller

import (
	"time"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// Config is what an operator may set. What is empty after [Config.Resolve] has been
// applied stays without effect.
type Config struct {
	// Profile presets the settings below for a known driver; an explicit setting wins.
	Profile string `mapstructure:"profile"`
	// DriverName is needed where the process has no connection to the driver.
	DriverName string `mapstructure:"driver-name"`
	// Workers is how many nodes, and separately how many volumes and claims, are worked
	// on at the same time.
	Workers int `mapstructure:"nodecontroller-workers"`
	// Timeout bounds each live read and write of a step.
	Timeout time.Duration `mapstructure:"timeout"`
	// RetryIntervalStart is the delay after the first failure of an item; it doubles
	// with each further one up to RetryIntervalMax.
	RetryIntervalStart time.Duration `mapstructure:"retry-interval-start"`
	RetryIntervalMax   time.Duration `mapstructure:"retry-interval-max"`

	// TopologyNodeKey is the label of a node by which the driver names it in the node
	// affinity of a volume; empty means the only key that the CSINodes report.
	TopologyNodeKey string `mapstructure:"topology-node-key"`

	NodeFinalizer              string            `mapstructure:"node-finalizer"`
	NodeFinalizerMode          NodeFinalizerMode `mapstructure:"node-finalizer-mode"`
	NodeFinalizerTimeout       time.Duration     `mapstructure:"node-finalizer-timeout"`
	NodeFinalizerWaitForOthers bool              `mapstructure:"node-finalizer-wait-for-others"`
	NodeDeleteGrace            time.Duration     `mapstructure:"node-delete-grace"`
	SkipNodeFinalize           bool              `mapstructure:"skip-node-finalize"`

	NodeCleanup              CleanupMode   `mapstructure:"node-cleanup"`
	NodeCleanupPaths         []string      `mapstructure:"node-cleanup-paths"`
	NodeCleanupScope         CleanupScope  `mapstructure:"node-cleanup-scope"`
	NodeCleanupUnbound       UnboundPolicy `mapstructure:"node-cleanup-unbound"`
	NodeCleanupRetain        RetainPolicy  `mapstructure:"node-cleanup-retain"`
	NodeCleanupStatic        bool          `mapstructure:"node-cleanup-static"`
	NodeCleanupOutOfService  bool          `mapstructure:"node-cleanup-out-of-service"`
	NodeOutOfServiceGrace    time.Duration `mapstructure:"node-out-of-service-grace"`
	NodeMissingGrace         time.Duration `mapstructure:"node-missing-grace"`
	NodeCleanupWindow        time.Duration `mapstructure:"node-cleanup-window"`
	NodeCleanupMaxFraction   float64       `mapstructure:"node-cleanup-max-fraction"`
	NodeCleanupMinNodes      int           `mapstructure:"node-cleanup-min-nodes"`
	NodeCleanupQPS           float64       `mapstructure:"node-cleanup-qps"`
	NodeCleanupBurst         int           `mapstructure:"node-cleanup-burst"`
	NodeCleanupResource      []string      `mapstructure:"node-cleanup-resource"`
	NodeCleanupResourceSweep time.Duration `mapstructure:"node-cleanup-resource-sweep"`
	PVReleaseGrace           time.Duration `mapstructure:"pv-release-grace"`
	PVRemovableFinalizers    []string      `mapstructure:"pv-removable-finalizers"`

	PVCFinalizer          string            `mapstructure:"pvc-finalizer"`
	PVCFinalizerMode      ClaimMode         `mapstructure:"pvc-finalizer-mode"`
	PVCObsoleteFinalizers []string          `mapstructure:"pvc-obsolete-finalizers"`
	PVCPodDeletion        PodDeletionPolicy `mapstructure:"pvc-pod-deletion"`
	// PVCPodDeletionGrace is what a pod is given to end; -1 means its own.
	PVCPodDeletionGrace time.Duration `mapstructure:"pvc-pod-deletion-grace"`
	ResizeNudge         bool          `mapstructure:"resize-nudge"`
	ResizeAnnotation    string        `mapstructure:"resize-annotation"`

	EnableWebhooks              bool          `mapstructure:"enable-webhooks"`
	WebhookAddr                 string        `mapstructure:"webhook-addr"`
	WebhookOptoutLabel          string        `mapstructure:"webhook-optout-label"`
	WebhookCertMode             CertMode      `mapstructure:"webhook-cert-mode"`
	WebhookCertSecret           string        `mapstructure:"webhook-cert-secret"`
	WebhookConfigName           string        `mapstructure:"webhook-config-name"`
	WebhookService              string        `mapstructure:"webhook-service"`
	WebhookClusterDomain        string        `mapstructure:"webhook-cluster-domain"`
	WebhookResolveDefaultClass  bool          `mapstructure:"webhook-resolve-default-class"`
	WebhookStripForeignCapacity bool          `mapstructure:"webhook-strip-foreign-capacity"`
	WebhookDisableHTTP2         bool          `mapstructure:"webhook-disable-http2"`
	CertDir                     string        `mapstructure:"cert-dir"`
	CapacityResource            string        `mapstructure:"capacity-resource"`
	CapacityAnnotationPrefix    string        `mapstructure:"capacity-annotation-prefix"`
	DeviceClassParameter        string        `mapstructure:"device-class-parameter"`
	DefaultDeviceClass          string        `mapstructure:"default-device-class"`
	DefaultVolumeSize           string        `mapstructure:"default-volume-size"` // a quantity
	ShutdownDelay               time.Duration `mapstructure:"shutdown-delay"`

	// LeaderElectionID is the name of the Lease.
	LeaderElectionID string `mapstructure:"leader-election-id"`

	// Explicit is where each setting, by the name of its flag, was set; those that are
	// not there were not, and a profile may preset them. Where it is nil, every setting
	// that differs from its default counts as set.
	Explicit map[string]Origin `mapstructure:"-"`

	// MinMissingGrace is the least NodeMissingGrace that is accepted; tests lower it.
	MinMissingGrace time.Duration `mapstructure:"-"`
	// ClockGap is for how long a node that is noted as missing counts as missing all along
	// while nobody notes that it still is.
	ClockGap time.Duration `mapstructure:"-"`
	// UnregisteredGrace is how long a driver has to be gone from a node until mode
	// manage takes the finalizer away again.
	UnregisteredGrace time.Duration `mapstructure:"-"`
}

// NodeFinalizerMode says what is done with the finalizer of nodes.
type NodeFinalizerMode string

// The modes of the finalizer of nodes.
const (
	NodeFinalizerOff    NodeFinalizerMode = "off"    // neither added nor removed
	NodeFinalizerRemove NodeFinalizerMode = "remove" // the driver adds it
	NodeFinalizerManage NodeFinalizerMode = "manage" // added to the nodes of the driver, and removed
)

// CleanupMode says how far the clean-up after a lost node goes.
type CleanupMode string

// The modes of the clean-up.
const (
	CleanupOff     CleanupMode = "off"
	CleanupReport  CleanupMode = "report"  // events and metrics only
	CleanupDryRun  CleanupMode = "dry-run" // and the writes, of which those that delete are only tried
	CleanupClaims  CleanupMode = "claims"  // claims are deleted
	CleanupVolumes CleanupMode = "volumes" // and volumes that nobody can delete any more are removed
)

// CleanupScope says which volumes are cleaned up.
type CleanupScope string

// The scopes of the clean-up.
const (
	ScopeOptIn CleanupScope = "opt-in" // those whose class or claim says so
	ScopeAll   CleanupScope = "all"    // all but those that are excepted
)

// UnboundPolicy says what becomes of claims that wait for a volume on a lost node.
type UnboundPolicy string

// The policies for unbound claims.
const (
	UnboundIgnore     UnboundPolicy = "ignore"
	UnboundReschedule UnboundPolicy = "reschedule" // the selected node is taken away
	UnboundDelete     UnboundPolicy = "delete"
)

// RetainPolicy says what becomes of claims whose volume is to be retained.
type RetainPolicy string

// The policies for volumes to be retained.
const (
	RetainSkip  RetainPolicy = "skip"
	RetainClaim RetainPolicy = "claim" // the claim is deleted, the volume stays
)

// ClaimMode says what is done with the finalizer of claims.
type ClaimMode string

// The modes of the finalizer of claims.
const (
	ClaimOff     ClaimMode = "off"
	ClaimStrip   ClaimMode = "strip"   // obsolete finalizers are removed wherever they are
	ClaimEnforce ClaimMode = "enforce" // pods that keep a claim from being deleted are deleted
)

// PodDeletionPolicy says which pods of a claim that is being deleted are deleted.
type PodDeletionPolicy string

// The policies for the pods of a claim that is being deleted.
const (
	PodsNone     PodDeletionPolicy = "none"
	PodsPending  PodDeletionPolicy = "pending"  // those without a node
	PodsOrphaned PodDeletionPolicy = "orphaned" // and those whose node is gone or going
	PodsAll      PodDeletionPolicy = "all"
)

// CertMode says where the certificate of the webhook server comes from.
type CertMode string

// The sources of the certificate of the webhook server.
const (
	CertFiles      CertMode = "files"       // tls.crt and tls.key in a directory
	CertSecret     CertMode = "secret"      // a Secret that somebody else fills
	CertSelfSigned CertMode = "self-signed" // a Secret that the leader fills
)

// The ways in which the clean-up learns that a node is gone.
const (
	PathFinalizer = "finalizer" // it is being deleted and waits for its finalizer
	PathOrphan    = "orphan"    // volumes name it and it is not there
)

// DefaultConfig is what is used where the operator sets nothing. Names that are empty
// in it follow from the driver; see [Config.Resolve].
func DefaultConfig() Config {
	return Config{
		Profile: ProfileNone, Workers: 4,
		Timeout: 15 * time.Second, RetryIntervalStart: time.Second, RetryIntervalMax: 5 * time.Minute,

		NodeFinalizerMode: NodeFinalizerOff, NodeFinalizerTimeout: 15 * time.Minute,
		NodeFinalizerWaitForOthers: true, NodeDeleteGrace: 5 * time.Minute,

		NodeCleanup: CleanupReport, NodeCleanupPaths: []string{PathFinalizer, PathOrphan}, NodeCleanupScope: ScopeOptIn,
		NodeCleanupUnbound: UnboundIgnore, NodeCleanupRetain: RetainSkip,
		NodeOutOfServiceGrace: time.Hour, NodeMissingGrace: 15 * time.Minute,
		NodeCleanupWindow: time.Hour, NodeCleanupMaxFraction: 0.1, NodeCleanupMinNodes: 1,
		NodeCleanupQPS: 0.5, NodeCleanupBurst: 10, NodeCleanupResourceSweep: 30 * time.Minute,
		PVReleaseGrace: 10 * time.Minute,

		PVCFinalizerMode: ClaimOff, PVCPodDeletion: PodsOrphaned, PVCPodDeletionGrace: -1, ResizeNudge: true,

		WebhookAddr: ":9443", WebhookCertMode: CertFiles, WebhookClusterDomain: "cluster.local", WebhookResolveDefaultClass: true, WebhookStripForeignCapacity: true,
		DefaultDeviceClass: "00default", DefaultVolumeSize: "1Gi", ShutdownDelay: 5 * time.Second,

		MinMissingGrace: time.Minute, ClockGap: 2 * reviewInterval, UnregisteredGrace: 10 * time.Minute,
	}
}

// Details is what the watches have to keep for c, which is resolved.
func (c Config) Details() kube.RetainedFields {
	return kube.RetainedFields{
		Nodes: true, Claims: true, PodAnnotations: []string{c.ResizeAnnotation},
		ClaimAnnotations: []string{annotationsOf(c.DriverName).cleanup},
	}
}
