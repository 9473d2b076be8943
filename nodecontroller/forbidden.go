package nodecontroller

import (
	"context"
	"time"

	"k8s.io/klog/v2"
)

// tellInterval is the time between two looks at whether a permission is missing.
const tellInterval = time.Second

// tellForbidden tells, in the log once and in events, what does not work because its
// watch is not permitted, until ctx ends or everything is watched.
func (c *Controller) tellForbidden(ctx context.Context) error {
	c.leads.Store(true)
	defer c.leads.Store(false)
	tick := time.NewTicker(tellInterval)
	defer tick.Stop()
	told := map[string]bool{}
	for {
		for kind, err := range c.deps.Informers.Forbidden() {
			what := c.dependents(kind)
			if !told[kind] {
				told[kind] = true
				klog.FromContext(ctx).Error(err, "A permission is missing: grant get, list and watch, or turn off what needs it; everything else goes on", "resource", kind, "needed for", what)
			}
			c.notify.seldom(c.csiDriver(), "forbidden "+kind, warning(reasonBlocked,
				"A permission is missing, get, list and watch of %s, without which %s does nothing: %v", kind, list(what), err))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// dependents is the flags that turn on what needs a kind that may be forbidden.
func (c *Controller) dependents(kind string) (flags []string) {
	if kind != "pods" {
		return []string{"--node-cleanup=" + string(c.cfg.NodeCleanup)}
	}
	if c.ownClaims.rules.nudge {
		flags = append(flags, "--resize-nudge")
	}
	if c.ownClaims.rules.finalizer != "" {
		flags = append(flags, "--pvc-finalizer-mode="+string(c.cfg.PVCFinalizerMode))
	}
	return flags
}
