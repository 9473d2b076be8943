// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/rbac"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// askDriver checks the driver and reads its name and capabilities. It checks the socket first,
// because an error of the file has a more specific cause than a failed call.
func (e *examination) askDriver(ctx context.Context) {
	e.driver.Name = e.in.DriverName
	cfg := e.in.CSI
	if cfg.Address == "" {
		e.unknown("socket", "--driver-name is set and --csi-address is not: the capabilities of the driver are unknown. "+
			"Set --csi-address where the socket can be reached")
		return
	}
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.Timeout, fmt.Errorf("not ready within --timeout=%v", cfg.Timeout))
	defer cancel()
	if err := dial(ctx, strings.TrimPrefix(cfg.Address, "unix://")); err != nil {
		e.add("socket", finding.Failing, socketHint(err), "%s: %v", cfg.Address, err)
		return
	}
	e.ok("socket", "%s accepts connections", cfg.Address)
	client, err := csiclient.New(cfg, prometheus.NewRegistry())
	if err != nil {
		e.add("driver", finding.Failing, "correct the flag", "%v", err)
		return
	}
	defer client.Close()
	e.Reached = true
	answer, err := client.Connect(ctx)
	if err != nil {
		hint := "check the log of the driver's container"
		switch {
		case csiclient.Answered(err):
			hint = "the driver answers with an error: check the log of its container, and its connection to the storage system"
		case errors.Is(err, context.Cause(ctx)):
			hint = "the driver does not answer or is not ready: check the log of its container, and its connection to the storage system"
		}
		e.add("driver", finding.Failing, hint, "%v", err)
		return
	}
	if e.in.DriverName != "" && e.in.DriverName != answer.Name {
		e.add("driver", finding.Failing, "correct --driver-name, or connect to the socket of that driver",
			"the name of the driver is %q, but the settings have %q", answer.Name, e.in.DriverName)
	} else {
		e.ok("driver", "%s, version %s", answer.Name, answer.VendorVersion)
	}
	e.driver, e.known = answer, true
	e.checkCapabilities()
}

// adopt makes plan, which a process reports about itself, that of e. The process may be an intruder in its container: grants that
// this version does not know as such are left out, and a driver name in the settings takes precedence.
func (e *examination) adopt(plan Plan) {
	e.plan, e.driver, e.known = plan, plan.Driver, plan.Known
	e.driver.Name = cmp.Or(e.in.DriverName, plan.Driver.Name)
	if e.in.Permissions != nil && e.User == "" {
		e.User = e.in.Permissions.User
	}
	switch {
	case plan.Driver.Name != "" && e.driver.Name != plan.Driver.Name:
		e.add("driver", finding.Failing, "correct --driver-name, or name the workload of that driver",
			"the process serves the driver %q, but the settings have %q", plan.Driver.Name, e.driver.Name)
	case e.known:
		e.ok("driver", "%s, version %s", e.driver.Name, e.driver.VendorVersion)
		e.checkCapabilities()
	default:
		e.unknown("driver", "the process has no connection to it: its capabilities are unknown")
	}
	named := func(all []rbac.Access) []rbac.Access { return OfDriver(all, plan.Driver.Name) }
	e.plan.Grants = slices.DeleteFunc(slices.Clone(plan.Grants), func(g rbac.Grant) bool {
		secrets := strings.HasSuffix(g.File, "-secrets") // those follow from the StorageClasses
		known := !secrets && g.IsKnown(named)
		if !known {
			e.unknown("rbac "+g.File, "version %s of doctor does not know these permissions as those of a process", e.Version)
		}
		return !known
	})
}

// addFeatures adds the permissions and API resources of every feature to p, a plan without the capabilities of the driver.
// It is unknown whether they are needed: if one is missing, it is a warning. plan is that of [Input].
func (p *Plan) addFeatures(driver string, plan func(csiclient.Driver, bool) Plan) {
	all := csiclient.Driver{
		Name: driver,
		// ExpandOnline and PublishUnpublishVolume also remove permissions.
		Plugin: csiclient.PluginCapabilities{
			ControllerService: true, VolumeAccessibilityConstraints: true, ExpandOffline: true, GroupControllerService: true,
		},
		Controller: csiclient.ControllerCapabilities{
			CreateDeleteVolume: true, PublishReadonly: true, ListVolumes: true, ListVolumesPublishedNodes: true, GetCapacity: true,
			CreateDeleteSnapshot: true, ListSnapshots: true, GetSnapshot: true, CloneVolume: true, ModifyVolume: true,
			SingleNodeMultiWriter: true, ExpandVolume: true,
		},
		Group: csiclient.GroupCapabilities{CreateDeleteGetVolumeGroupSnapshot: true},
	}
	for _, publishes := range []bool{true, false} {
		all.Controller.PublishUnpublishVolume = publishes
		features := plan(all, false)
		for _, g := range features.Grants {
			if !slices.ContainsFunc(p.Grants, func(planned rbac.Grant) bool { return planned.File == g.File }) {
				g.Without = cmp.Or(g.Without, "the role does not work if the driver has the capability that needs it")
				p.Grants = append(p.Grants, g)
			}
		}
		for _, a := range features.APIs {
			if !slices.ContainsFunc(p.APIs, func(planned API) bool { return planned.For == a.For && planned.Resource == a.Resource }) {
				a.Required = false
				p.APIs = append(p.APIs, a)
			}
		}
	}
}

func dial(ctx context.Context, path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSocket == 0 {
		return errors.New("the file is not a socket")
	}
	var dialer net.Dialer
	connection, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	return connection.Close()
}

func socketHint(err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "check that the driver is running and serves this path, and that both containers mount the volume of the socket. " +
			"Outside of the pod, set --driver-name instead"
	case errors.Is(err, fs.ErrPermission):
		return "the user of this process may not connect to the socket: set runAsUser, or fsGroup of the pod, to those of the driver"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "no process listens on the socket: check the container of the driver"
	}
	return "set --csi-address to the socket that the driver serves (its flag --endpoint)"
}

// checkCapabilities lists the capabilities of the driver and checks their combination.
func (e *examination) checkCapabilities() {
	const name = "capabilities"
	list := strings.Join(e.driver.CapabilityNames(), ", ")
	if list == "" {
		list = "none"
	}
	switch c := e.driver.Controller; {
	case !e.driver.Plugin.ControllerService:
		e.add(name, finding.Warning, "check that this is the socket of the controller plugin, not of the node plugin",
			"the driver does not report CONTROLLER_SERVICE, so that it cannot provision or attach volumes; it reports %s", list)
	case c.ListVolumesPublishedNodes && !c.ListVolumes:
		e.add(name, finding.Warning, "report LIST_VOLUMES in the driver",
			"LIST_VOLUMES_PUBLISHED_NODES has no effect without LIST_VOLUMES; the driver reports %s", list)
	default:
		e.ok(name, "%s", list)
	}
}
