package nodecontroller

import (
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/nodecontroller/pvcfinalizer"
	"github.com/storage-controller/storage-controller/nodecontroller/servingcert"
)

// Validate returns all errors in c. Names that are still empty are not checked.
func (c Config) Validate() error {
	_, profile := c.profile()
	return errors.Join(profile, c.validateNames(), c.validateModes(), c.validateNumbers(), c.validateWebhooks())
}

// named is the value of a flag.
type named[T any] struct {
	flag  string
	value T
}

// validateNames checks names that become part of objects, before the API server refuses a write.
func (c Config) validateNames() error {
	var errs []error
	for _, n := range []named[[]string]{
		{"--node-finalizer", []string{c.NodeFinalizer}}, {"--pvc-finalizer", []string{c.PVCFinalizer}},
		{"--pvc-obsolete-finalizers", c.PVCObsoleteFinalizers}, {"--pv-removable-finalizers", c.PVRemovableFinalizers},
		{"--resize-annotation", []string{c.ResizeAnnotation}},
	} {
		for _, name := range n.value {
			if name != "" {
				errs = append(errs, prefixed(n.flag, name))
			}
		}
	}
	if slices.Contains(c.PVRemovableFinalizers, "kubernetes.io/pv-protection") {
		errs = append(errs,
			errors.New("--pv-removable-finalizers: Kubernetes removes kubernetes.io/pv-protection when the volume is unused"))
	}
	if key := c.TopologyNodeKey; key != "" {
		errs = append(errs, legal("--topology-node-key", key, validation.IsQualifiedName(key)))
	}
	if name := c.CapacityResource; name != "" {
		errs = append(errs, extendedResource("--capacity-resource", name))
	}
	if prefix := c.CapacityAnnotationPrefix; prefix != "" {
		domain, slash := strings.CutSuffix(prefix, "/")
		if !slash {
			errs = append(errs, fmt.Errorf("--capacity-annotation-prefix: must end with a slash, got %q", prefix))
		}
		errs = append(errs, legal("--capacity-annotation-prefix", prefix, validation.IsDNS1123Subdomain(domain)))
	}
	if name := c.DefaultDeviceClass; strings.Contains(name, "/") {
		errs = append(errs, fmt.Errorf("--default-device-class: must not contain a slash, got %q", name))
	} else {
		errs = append(errs, legal("--default-device-class", name, validation.IsQualifiedName(name)))
	}
	if id := c.LeaderElectionID; id != "" {
		errs = append(errs, legal("--leader-election-id", id, validation.IsDNS1123Subdomain(id)))
	}
	return errors.Join(errs...)
}

func (c Config) validateModes() error {
	errs := []error{
		oneOf("--node-finalizer-mode", c.NodeFinalizerMode, nodecleanup.FinalizerOff, nodecleanup.FinalizerRemove,
			nodecleanup.FinalizerManage),
		oneOf("--node-cleanup", c.NodeCleanup, nodecleanup.ModeOff, nodecleanup.ModeReport, nodecleanup.ModeDryRun,
			nodecleanup.ModeClaims, nodecleanup.ModeVolumes),
		oneOf("--node-cleanup-scope", c.NodeCleanupScope, nodecleanup.ScopeOptIn, nodecleanup.ScopeAll),
		oneOf("--node-cleanup-retain", c.NodeCleanupRetain, nodecleanup.RetainSkip, nodecleanup.RetainClaim),
		oneOf("--pvc-finalizer-mode", c.PVCFinalizerMode, pvcfinalizer.ModeOff, pvcfinalizer.ModeStrip, pvcfinalizer.ModeEnforce),
		oneOf("--pvc-pod-deletion", c.PVCPodDeletion, pvcfinalizer.PodsNone, pvcfinalizer.PodsPending, pvcfinalizer.PodsOrphaned,
			pvcfinalizer.PodsAll),
		oneOf("--webhook-cert-mode", c.WebhookCertMode, servingcert.Files, servingcert.Secret, servingcert.SelfSigned),
	}
	if c.NodeCleanupUnbound == "reschedule" {
		errs = append(errs, fmt.Errorf("--node-cleanup-unbound: reschedule was removed: set %s, with which the provisioner lets the "+
			"scheduler select another node", nodecleanup.UnboundIgnore))
	} else {
		errs = append(errs, oneOf("--node-cleanup-unbound", c.NodeCleanupUnbound, nodecleanup.UnboundIgnore, nodecleanup.UnboundDelete))
	}
	for _, path := range c.NodeCleanupPaths {
		errs = append(errs, oneOf("--node-cleanup-paths", path, nodecleanup.PathFinalizer, nodecleanup.PathOrphan))
	}
	if c.PVCFinalizerMode == pvcfinalizer.ModeEnforce && c.PVCFinalizer != "" && slices.Contains(c.PVCObsoleteFinalizers, c.PVCFinalizer) {
		errs = append(errs, fmt.Errorf("--pvc-obsolete-finalizers: contains %s, which --pvc-finalizer-mode=%s keeps; remove it from the "+
			"list",
			c.PVCFinalizer, pvcfinalizer.ModeEnforce))
	}
	for _, text := range c.NodeCleanupResource {
		if _, err := nodecleanup.ParseResource(text); err != nil {
			errs = append(errs, fmt.Errorf("--node-cleanup-resource %q: %w", text, err))
		}
	}
	return errors.Join(errs...)
}

func (c Config) validateNumbers() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	for _, d := range []named[time.Duration]{
		{"timeout", c.Timeout}, {"retry-interval-start", c.RetryIntervalStart}, {"retry-interval-max", c.RetryIntervalMax},
	} {
		check(d.value > 0, "--%s: must be positive, got %v", d.flag, d.value)
	}
	for _, d := range []named[time.Duration]{
		{"node-finalizer-timeout", c.NodeFinalizerTimeout}, {"node-delete-grace", c.NodeDeleteGrace},
		{"node-cleanup-window", c.NodeCleanupWindow}, {"pv-release-grace", c.PVReleaseGrace}, {"shutdown-delay", c.ShutdownDelay},
	} {
		check(d.value >= 0, "--%s: must not be negative, got %v", d.flag, d.value)
	}
	check(c.PVCPodDeletionGrace >= 0 || c.PVCPodDeletionGrace == -1,
		"--pvc-pod-deletion-grace: must not be negative, except -1 for the grace period of the pod, got %v", c.PVCPodDeletionGrace)
	check(c.NodeMissingGrace >= c.MinMissingGrace, "--node-missing-grace: must be at least %v, got %v", c.MinMissingGrace,
		c.NodeMissingGrace)
	check(c.Workers > 0, "--nodecontroller-workers: must be positive, got %d", c.Workers)
	// NaN is not in the range either
	check(c.NodeCleanupMaxFraction >= 0 && c.NodeCleanupMaxFraction <= 1,
		"--node-cleanup-max-fraction: must be between 0 and 1, got %v", c.NodeCleanupMaxFraction)
	check(c.NodeCleanupMinNodes >= 0, "--node-cleanup-min-nodes: must not be negative, got %d", c.NodeCleanupMinNodes)
	check(c.NodeCleanupQPS > 0 && !math.IsInf(c.NodeCleanupQPS, 0), "--node-cleanup-qps: must be positive, got %v", c.NodeCleanupQPS)
	check(c.NodeCleanupBurst >= 1, "--node-cleanup-burst: must be at least 1, got %d", c.NodeCleanupBurst)
	return errors.Join(errs...)
}

func (c Config) validateWebhooks() error {
	if !c.EnableWebhooks {
		return nil
	}
	var errs []error
	if _, port, err := net.SplitHostPort(c.WebhookAddr); err != nil {
		errs = append(errs, fmt.Errorf("--webhook-addr: must be host:port, such as :9443, got %q", c.WebhookAddr))
	} else if _, err := net.LookupPort("tcp", port); err != nil {
		errs = append(errs, fmt.Errorf("--webhook-addr: %q is not a port", port))
	}
	secret := named[string]{"--webhook-cert-secret", c.WebhookCertSecret}
	required := map[servingcert.Mode][]named[string]{
		servingcert.Secret: {secret},
		servingcert.SelfSigned: {
			secret, {"--webhook-config-name", c.WebhookConfigName}, {"--webhook-service", c.WebhookService},
		},
	}
	for _, n := range required[c.WebhookCertMode] {
		if n.value == "" {
			errs = append(errs, fmt.Errorf("%s: must be set with --webhook-cert-mode=%s", n.flag, c.WebhookCertMode))
		}
	}
	return errors.Join(errs...)
}

// DeletingFlags returns the flags with which c deletes objects that belong to others. c must be resolved.
func (c Config) DeletingFlags() []string {
	var flags []string
	if c.Deletes() && c.NodeCleanup != nodecleanup.ModeDryRun {
		flags = append(flags, fmt.Sprintf("--node-cleanup=%s", c.NodeCleanup))
	}
	if c.PVCFinalizerMode == pvcfinalizer.ModeEnforce && c.PVCPodDeletion != pvcfinalizer.PodsNone {
		flags = append(flags, fmt.Sprintf("--pvc-finalizer-mode=%s with --pvc-pod-deletion=%s", c.PVCFinalizerMode, c.PVCPodDeletion))
	}
	return flags
}

// prefixed returns an error unless name is a qualified name with a prefix, such as example.com/node.
func prefixed(flag, name string) error {
	if !strings.Contains(name, "/") {
		return fmt.Errorf("%s: must have a prefix, as in example.com/name, got %q", flag, name)
	}
	return legal(flag, name, validation.IsQualifiedName(name))
}

// extendedResource returns an error unless containers can request name as an extended resource.
func extendedResource(flag, name string) error {
	prefix, short, ok := strings.Cut(name, "/")
	switch {
	case !ok:
		return fmt.Errorf("%s: must be an extended resource with a prefix, as in example.com/capacity, got %q", flag, name)
	case strings.HasSuffix(prefix, "kubernetes.io"):
		return fmt.Errorf("%s: the prefix %s belongs to Kubernetes, got %q", flag, prefix, name)
	case strings.HasPrefix(name, "requests."):
		return fmt.Errorf("%s: must not begin with requests., got %q", flag, name)
	case len(short) > 63:
		return fmt.Errorf("%s: the part after the slash must have at most 63 characters, got %q", flag, name)
	}
	// a quota adds this prefix, and the result must be legal, too
	return legal(flag, name, validation.IsQualifiedName("requests."+name))
}

// legal returns the problems of a name as one error.
func legal(flag, name string, problems []string) error {
	if len(problems) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %q is not a legal name: %s", flag, name, strings.Join(problems, "; "))
}

// oneOf returns an error unless value is one of known.
func oneOf[T ~string](flag string, value T, known ...T) error {
	if slices.Contains(known, value) {
		return nil
	}
	names := make([]string, len(known))
	for i, k := range known {
		names[i] = string(k)
	}
	return fmt.Errorf("%s: must be one of %s, got %s", flag, strings.Join(names, ", "), strconv.Quote(string(value)))
}
