package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/storage-controller/storage-controller/csiclient"
)

// askDriver looks at the socket first, since "it does not answer" has many causes and
// the file tells them apart.
func (e *examination) askDriver(ctx context.Context) {
	e.driver.Name = e.in.DriverName
	cfg := e.in.CSI
	if cfg.Address == "" {
		e.skip("socket", "not asked: --driver-name tells the name, and what the driver can do stays unknown; set --csi-address where its socket can be reached")
		return
	}
	ctx, cancel := context.WithTimeoutCause(ctx, cfg.Timeout, fmt.Errorf("no answer within --timeout=%v", cfg.Timeout))
	defer cancel()
	if err := dial(ctx, strings.TrimPrefix(cfg.Address, "unix://")); err != nil {
		e.add("socket", Failure, socketHint(err), "%s: %v", cfg.Address, err)
		return
	}
	e.ok("socket", "%s accepts connections", cfg.Address)
	client, err := csiclient.New(cfg, prometheus.NewRegistry())
	if err != nil {
		e.add("driver", Failure, "correct the flag", "%v", err)
		return
	}
	defer client.Close()
	e.report.Reached = true
	answer, err := client.Connect(ctx)
	if err != nil {
		hint := "look at the log of the driver's container"
		if errors.Is(err, context.Cause(ctx)) {
			hint = "the driver does not answer or says that it is not ready: look at the log of its container, and whether it can reach its storage"
		}
		e.add("driver", Failure, hint, "%v", err)
		return
	}
	if e.in.DriverName != "" && e.in.DriverName != answer.Name {
		e.add("driver", Failure, "correct --driver-name or --profile, or connect to the right socket", "its name is %q, and the settings say %q", answer.Name, e.in.DriverName)
	} else {
		e.ok("driver", "%s, version %s", answer.Name, answer.VendorVersion)
	}
	e.driver, e.known = answer, true
	e.checkCapabilities()
}

func dial(ctx context.Context, path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSocket == 0 {
		return errNoSocket
	}
	var dialer net.Dialer
	connection, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	return connection.Close()
}

var errNoSocket = errors.New("the file is not a socket")

func socketHint(err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "is the driver running, does it serve this path, and is the volume with the socket mounted in both containers? Outside of the pod set --driver-name instead"
	case errors.Is(err, fs.ErrPermission):
		return "the user of this process may not open the socket: set runAsUser, or fsGroup of the pod, to those of the driver"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "nobody listens: the file was left behind by a driver that has ended; look at its container"
	}
	return "set --csi-address to the socket that the driver serves (its flag --endpoint)"
}

// checkCapabilities lists what the driver can do, and what contradicts itself.
func (e *examination) checkCapabilities() {
	var have []string
	c := e.driver.Controller
	for _, item := range []struct {
		name string
		has  bool
	}{
		{"CONTROLLER_SERVICE", e.driver.Plugin.ControllerService},
		{"VOLUME_ACCESSIBILITY_CONSTRAINTS", e.driver.Plugin.VolumeAccessibilityConstraints},
		{"CREATE_DELETE_VOLUME", c.CreateDeleteVolume},
		{"PUBLISH_UNPUBLISH_VOLUME", c.PublishUnpublishVolume},
		{"PUBLISH_READONLY", c.PublishReadonly},
		{"LIST_VOLUMES", c.ListVolumes},
		{"LIST_VOLUMES_PUBLISHED_NODES", c.ListVolumesPublishedNodes},
		{"GET_CAPACITY", c.GetCapacity},
		{"CREATE_DELETE_SNAPSHOT", c.CreateDeleteSnapshot},
		{"CLONE_VOLUME", c.CloneVolume},
		{"MODIFY_VOLUME", c.ModifyVolume},
		{"SINGLE_NODE_MULTI_WRITER", c.SingleNodeMultiWriter},
	} {
		if item.has {
			have = append(have, item.name)
		}
	}
	list := strings.Join(have, ", ")
	switch {
	case !e.driver.Plugin.ControllerService:
		e.add("capabilities", Warning, "is this the socket of the node plugin? That of the controller plugin reports CONTROLLER_SERVICE", "the driver has no controller service: there is nothing to provision or attach; it reports %s", orNothing(list))
	case c.ListVolumesPublishedNodes && !c.ListVolumes:
		e.add("capabilities", Warning, "have the driver report LIST_VOLUMES too", "LIST_VOLUMES_PUBLISHED_NODES has no effect without LIST_VOLUMES; the driver reports %s", list)
	default:
		e.ok("capabilities", "%s", orNothing(list))
	}
}

func orNothing(list string) string {
	if list == "" {
		return "none"
	}
	return list
}
