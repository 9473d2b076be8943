// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package nodecontroller

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/internal/workloop"
	"github.com/storage-controller/storage-controller/nodecontroller/nodecleanup"
	"github.com/storage-controller/storage-controller/nodecontroller/pvcfinalizer"
	"github.com/storage-controller/storage-controller/topolvm"
)

// Validate returns all errors in c. Names that are still empty are not checked.
func (c Config) Validate() error {
	return errors.Join(c.validateNames(), c.validateModes(), c.validateNumbers(), c.validateWebhooks())
}

// validateNames checks names that become part of objects, before the API server refuses a write.
func (c Config) validateNames() error {
	var errs []error
	check := func(flag string, illegal func(string) []string, names ...string) {
		for _, name := range names {
			if problems := illegal(name); name != "" && len(problems) > 0 {
				errs = append(errs, fmt.Errorf("%s: %s, got %q", flag, strings.Join(problems, "; "), name))
			}
		}
	}
	check("--node-finalizer", prefixed, c.NodeFinalizer)
	check("--pvc-finalizer", prefixed, c.PVCFinalizer)
	check("--pvc-obsolete-finalizers", prefixed, c.PVCObsoleteFinalizers...)
	check("--resize-annotation", prefixed, c.ResizeAnnotation)
	check("--topology-node-key", ofSingleNodes, c.TopologyNodeKey)
	check("--capacity-resource", extendedResource, c.CapacityResource)
	check("--leader-election-id", validation.IsDNS1123Subdomain, c.LeaderElectionID)
	check("--capacity-annotation-prefix", func(prefix string) []string {
		if domain, slash := strings.CutSuffix(prefix, "/"); slash {
			return validation.IsDNS1123Subdomain(domain)
		}
		return []string{"must end with a slash"}
	}, c.CapacityAnnotationPrefix)
	if name := c.DefaultDeviceClass; strings.Contains(name, "/") || len(validation.IsQualifiedName(name)) > 0 {
		errs = append(errs, fmt.Errorf("--default-device-class: must be the name of an annotation without a slash, got %q", name))
	}
	for _, name := range append(slices.Clone(c.PVCObsoleteFinalizers), c.PVCFinalizer) {
		if domain, _, _ := strings.Cut(name, "/"); domain == "kubernetes.io" || domain == "storage-controller.io" {
			errs = append(errs, fmt.Errorf("--pvc-finalizer, --pvc-obsolete-finalizers: must not contain %s, which protects PVCs", name))
		}
	}
	return errors.Join(errs...)
}

func (c Config) validateModes() error {
	errs := []error{
		c.Settings.Validate(),
		nodecleanup.OneOf("--pvc-finalizer-mode", c.PVCFinalizerMode, pvcfinalizer.ModeOff, pvcfinalizer.ModeStrip,
			pvcfinalizer.ModeEnforce),
	}
	if c.PVCFinalizerMode == pvcfinalizer.ModeEnforce && c.DriverName != "" && !topolvm.IsDriver(c.DriverName) {
		errs = append(errs, fmt.Errorf("--pvc-finalizer-mode=%s: is for TopoLVM only, but the driver is %q. Set strip or off",
			pvcfinalizer.ModeEnforce, c.DriverName))
	}
	if c.PVCFinalizerMode == pvcfinalizer.ModeEnforce && c.PVCFinalizer != "" && slices.Contains(c.PVCObsoleteFinalizers, c.PVCFinalizer) {
		errs = append(errs, fmt.Errorf("--pvc-obsolete-finalizers: must not contain %s, which --pvc-finalizer-mode=%s keeps",
			c.PVCFinalizer, pvcfinalizer.ModeEnforce))
	}
	return errors.Join(errs...)
}

func (c Config) validateNumbers() error {
	errs := []error{workloop.ValidateFlags(c.Timeout, c.RetryIntervalStart, c.RetryIntervalMax)}
	if c.ShutdownDelay < 0 {
		errs = append(errs, fmt.Errorf("--shutdown-delay: must not be negative, got %v", c.ShutdownDelay))
	}
	if c.Workers <= 0 {
		errs = append(errs, fmt.Errorf("--nodecontroller-workers: must be positive, got %d", c.Workers))
	}
	return errors.Join(errs...)
}

func (c Config) validateWebhooks() error {
	if !c.EnableWebhooks {
		return nil
	}
	if _, port, err := net.SplitHostPort(c.WebhookAddr); err != nil {
		return fmt.Errorf("--webhook-addr: must be host:port, such as :9443, got %q", c.WebhookAddr)
	} else if _, err := net.LookupPort("tcp", port); err != nil {
		return fmt.Errorf("--webhook-addr: %q is not a port", port)
	}
	return nil
}

// DeletingFlags returns the flags with which c deletes objects that belong to others. c must be complete.
func (c Config) DeletingFlags() []string {
	var flags []string
	if c.Deletes() {
		flags = append(flags, fmt.Sprintf("--node-cleanup=%s", c.NodeCleanup))
	}
	if c.PVCFinalizerMode == pvcfinalizer.ModeEnforce {
		flags = append(flags, fmt.Sprintf("--pvc-finalizer-mode=%s", c.PVCFinalizerMode))
	}
	return flags
}

// prefixed returns the problems of name as a qualified name with a prefix, such as example.com/node.
func prefixed(name string) []string {
	if !strings.Contains(name, "/") {
		return []string{"must have a prefix, as in example.com/name"}
	}
	return validation.IsQualifiedName(name)
}

// ofSingleNodes returns why name cannot be the label of single nodes. The volumes of a zone are not lost with its last node.
func ofSingleNodes(name string) []string {
	if short := name[strings.LastIndex(name, "/")+1:]; short == "zone" || short == "region" {
		return []string{"must have one value per node, not per " + short}
	}
	return validation.IsQualifiedName(name)
}

// extendedResource returns why containers cannot request name as an extended resource.
func extendedResource(name string) []string {
	prefix, short, ok := strings.Cut(name, "/")
	switch {
	case !ok:
		return []string{"must be an extended resource with a prefix, as in example.com/capacity"}
	case strings.HasSuffix(prefix, "kubernetes.io"):
		return []string{"the prefix belongs to Kubernetes"}
	case strings.HasPrefix(name, "requests."):
		return []string{"must not begin with requests."}
	case len(short) > 63:
		return []string{"the part after the slash must have at most 63 characters"}
	}
	return validation.IsQualifiedName("requests." + name) // a quota adds this prefix
}
