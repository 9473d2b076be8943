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

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Validate reports everything that is wrong with c. It is for a resolved c; of one that
// is not, the names that are still to be derived are not looked at.
func (c Config) Validate() error {
	_, profile := c.profile()
	return errors.Join(profile, c.validateNames(), c.validateModes(), c.validateNumbers(), c.validateCleanup(), c.validateWebhooks())
}

// validateNames looks at what becomes part of objects, which the API server would
// refuse only when it is written.
func (c Config) validateNames() error {
	var errs []error
	for flag, name := range map[string]string{
		"node-finalizer": c.NodeFinalizer, "pvc-finalizer": c.PVCFinalizer, "resize-annotation": c.ResizeAnnotation,
		"webhook-optout-label": c.WebhookOptoutLabel,
	} {
		if name != "" {
			errs = append(errs, prefixed("--"+flag, name))
		}
	}
	for _, name := range c.PVCObsoleteFinalizers {
		errs = append(errs, prefixed("--pvc-obsolete-finalizers", name))
	}
	for _, name := range c.PVRemovableFinalizers {
		errs = append(errs, prefixed("--pv-removable-finalizers", name))
		if name == "kubernetes.io/pv-protection" {
			errs = append(errs, fmt.Errorf("--pv-removable-finalizers: %s is removed by Kubernetes, once nobody uses the volume", name))
		}
	}
	if key := c.TopologyNodeKey; key != "" {
		errs = append(errs, problems("--topology-node-key", key, validation.IsQualifiedName(key)))
	}
	if name := c.CapacityResource; name != "" {
		errs = append(errs, extendedResource("--capacity-resource", name))
	}
	if prefix := c.CapacityAnnotationPrefix; prefix != "" {
		domain, slash := strings.CutSuffix(prefix, "/")
		if !slash {
			errs = append(errs, fmt.Errorf("--capacity-annotation-prefix: must end with a slash, got %q", prefix))
		}
		errs = append(errs, problems("--capacity-annotation-prefix", prefix, validation.IsDNS1123Subdomain(domain)))
	}
	if name := c.DefaultDeviceClass; strings.Contains(name, "/") {
		errs = append(errs, fmt.Errorf("--default-device-class: must be the last part of the name of an annotation, without a slash, got %q", name))
	} else {
		errs = append(errs, problems("--default-device-class", name, validation.IsQualifiedName(name)))
	}
	if domain := c.WebhookClusterDomain; domain != "" {
		errs = append(errs, problems("--webhook-cluster-domain", domain, validation.IsDNS1123Subdomain(domain)))
	}
	if id := c.LeaderElectionID; id != "" {
		errs = append(errs, problems("--leader-election-id", id, validation.IsDNS1123Subdomain(id)))
	}
	return sorted(errs)
}

func (c Config) validateModes() error {
	errs := []error{
		oneOf("--node-finalizer-mode", c.NodeFinalizerMode, NodeFinalizerOff, NodeFinalizerRemove, NodeFinalizerManage),
		oneOf("--node-cleanup", c.NodeCleanup, CleanupOff, CleanupReport, CleanupDryRun, CleanupClaims, CleanupVolumes),
		oneOf("--node-cleanup-scope", c.NodeCleanupScope, ScopeOptIn, ScopeAll),
		oneOf("--node-cleanup-unbound", c.NodeCleanupUnbound, UnboundIgnore, UnboundReschedule, UnboundDelete),
		oneOf("--node-cleanup-retain", c.NodeCleanupRetain, RetainSkip, RetainClaim),
		oneOf("--pvc-finalizer-mode", c.PVCFinalizerMode, ClaimOff, ClaimStrip, ClaimEnforce),
		oneOf("--pvc-pod-deletion", c.PVCPodDeletion, PodsNone, PodsPending, PodsOrphaned, PodsAll),
		oneOf("--webhook-cert-mode", c.WebhookCertMode, CertFiles, CertSecret, CertSelfSigned),
	}
	for _, path := range c.NodeCleanupPaths {
		errs = append(errs, oneOf("--node-cleanup-paths", path, PathFinalizer, PathOrphan))
	}
	if c.PVCFinalizerMode == ClaimEnforce && c.PVCFinalizer != "" && slices.Contains(c.PVCObsoleteFinalizers, c.PVCFinalizer) {
		errs = append(errs, fmt.Errorf("--pvc-obsolete-finalizers: %s is --pvc-finalizer too, which --pvc-finalizer-mode=%s keeps; take it out of one of them", c.PVCFinalizer, ClaimEnforce))
	}
	return errors.Join(errs...)
}

func (c Config) validateNumbers() error {
	var errs []error
	for flag, d := range map[string]time.Duration{
		"timeout": c.Timeout, "retry-interval-start": c.RetryIntervalStart, "retry-interval-max": c.RetryIntervalMax,
	} {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("--%s: must be positive, got %v", flag, d))
		}
	}
	for flag, d := range map[string]time.Duration{
		"node-finalizer-timeout": c.NodeFinalizerTimeout, "node-delete-grace": c.NodeDeleteGrace,
		"node-out-of-service-grace": c.NodeOutOfServiceGrace, "node-cleanup-window": c.NodeCleanupWindow,
		"node-cleanup-resource-sweep": c.NodeCleanupResourceSweep, "pv-release-grace": c.PVReleaseGrace,
		"shutdown-delay": c.ShutdownDelay,
	} {
		if d < 0 {
			errs = append(errs, fmt.Errorf("--%s: must not be negative, got %v", flag, d))
		}
	}
	if d := c.PVCPodDeletionGrace; d < 0 && d != -1 {
		errs = append(errs, fmt.Errorf("--pvc-pod-deletion-grace: must not be negative, but for -1, which means the pod's own, got %v", d))
	}
	if c.NodeMissingGrace < c.MinMissingGrace {
		errs = append(errs, fmt.Errorf("--node-missing-grace: must be at least %v, got %v", c.MinMissingGrace, c.NodeMissingGrace))
	}
	if c.Workers <= 0 {
		errs = append(errs, fmt.Errorf("--nodecontroller-workers: must be positive, got %d", c.Workers))
	}
	if f := c.NodeCleanupMaxFraction; !(f >= 0 && f <= 1) { // which NaN is not either
		errs = append(errs, fmt.Errorf("--node-cleanup-max-fraction: must be between 0 and 1, got %v", f))
	}
	if c.NodeCleanupMinNodes < 0 {
		errs = append(errs, fmt.Errorf("--node-cleanup-min-nodes: must not be negative, got %d", c.NodeCleanupMinNodes))
	}
	if qps := c.NodeCleanupQPS; !(qps > 0) || math.IsInf(qps, 0) {
		errs = append(errs, fmt.Errorf("--node-cleanup-qps: must be positive, got %v", qps))
	}
	if c.NodeCleanupBurst < 1 {
		errs = append(errs, fmt.Errorf("--node-cleanup-burst: must be at least 1, got %d", c.NodeCleanupBurst))
	}
	return sorted(errs)
}

func (c Config) validateCleanup() error {
	var errs []error
	for _, text := range c.NodeCleanupResource {
		if _, err := ParseResource(text); err != nil {
			errs = append(errs, fmt.Errorf("--node-cleanup-resource %q: %w", text, err))
		}
	}
	return errors.Join(errs...)
}

func (c Config) validateWebhooks() error {
	var errs []error
	if size, err := resource.ParseQuantity(c.DefaultVolumeSize); err != nil || size.Sign() <= 0 {
		errs = append(errs, fmt.Errorf("--default-volume-size: must be a quantity above 0, such as 1Gi, got %q", c.DefaultVolumeSize))
	}
	if !c.EnableWebhooks {
		return errors.Join(errs...)
	}
	if _, port, err := net.SplitHostPort(c.WebhookAddr); err != nil {
		errs = append(errs, fmt.Errorf("--webhook-addr: must be host:port, such as :9443, got %q", c.WebhookAddr))
	} else if _, err := net.LookupPort("tcp", port); err != nil {
		errs = append(errs, fmt.Errorf("--webhook-addr: %q is no port", port))
	}
	required := map[CertMode][][2]string{
		CertSecret:     {{"webhook-cert-secret", c.WebhookCertSecret}},
		CertSelfSigned: {{"webhook-cert-secret", c.WebhookCertSecret}, {"webhook-config-name", c.WebhookConfigName}, {"webhook-service", c.WebhookService}},
	}
	for _, flag := range required[c.WebhookCertMode] {
		if flag[1] == "" {
			errs = append(errs, fmt.Errorf("--%s: must be set with --webhook-cert-mode=%s", flag[0], c.WebhookCertMode))
		}
	}
	return errors.Join(errs...)
}

// Deletes names the settings by which c deletes objects of others, or releases them for
// that: it is empty where nothing can be lost. c must be resolved.
func (c Config) Deletes() []string {
	var flags []string
	if c.NodeCleanup == CleanupClaims || c.NodeCleanup == CleanupVolumes { // without which the policies and resources of the clean-up have no effect
		flags = append(flags, fmt.Sprintf("--node-cleanup=%s", c.NodeCleanup))
	}
	if c.PVCFinalizerMode == ClaimEnforce && c.PVCPodDeletion != PodsNone {
		flags = append(flags, fmt.Sprintf("--pvc-finalizer-mode=%s with --pvc-pod-deletion=%s", c.PVCFinalizerMode, c.PVCPodDeletion))
	}
	return flags
}

// prefixed is nil when name is a qualified name with a prefix, such as example.com/node.
func prefixed(what, name string) error {
	if !strings.Contains(name, "/") {
		return fmt.Errorf("%s: must have a prefix, as in example.com/name, got %q", what, name)
	}
	return problems(what, name, validation.IsQualifiedName(name))
}

// extendedResource is nil when containers can ask for name as they do for devices.
func extendedResource(what, name string) error {
	prefix, short, ok := strings.Cut(name, "/")
	switch {
	case !ok:
		return fmt.Errorf("%s: must be an extended resource, which has a prefix, as in example.com/capacity, got %q", what, name)
	case strings.HasSuffix(prefix, "kubernetes.io"):
		return fmt.Errorf("%s: the prefix %s belongs to Kubernetes, got %q", what, prefix, name)
	case strings.HasPrefix(name, "requests."):
		return fmt.Errorf("%s: must not begin with requests., got %q", what, name)
	case len(short) > 63:
		return fmt.Errorf("%s: the part after the slash must have at most 63 characters, got %q", what, name)
	}
	// The name in a quota, which has that prefix, must be legal too.
	return problems(what, name, validation.IsQualifiedName("requests."+name))
}

// problems is one error of all findings of a check of a name.
func problems(what, name string, findings []string) error {
	if len(findings) == 0 {
		return nil
	}
	return fmt.Errorf("%s: %q is no legal name: %s", what, name, strings.Join(findings, "; "))
}

// oneOf is nil when value is one of known.
func oneOf[T ~string](what string, value T, known ...T) error {
	if slices.Contains(known, value) {
		return nil
	}
	names := make([]string, len(known))
	for i, k := range known {
		names[i] = string(k)
	}
	return fmt.Errorf("%s: must be one of %s, got %s", what, strings.Join(names, ", "), strconv.Quote(string(value)))
}

// sorted joins errs by their texts, where they were found in no order.
func sorted(errs []error) error {
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}
