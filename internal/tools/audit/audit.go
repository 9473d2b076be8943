package audit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/storage-controller/storage-controller/csiclient"
)

// Lister is the call of the driver that is made here.
type Lister interface {
	ListVolumes(context.Context, *csi.ListVolumesRequest, ...grpc.CallOption) (*csi.ListVolumesResponse, error)
}

// Config is what an operator may set.
type Config struct {
	// Timeout bounds each page of ListVolumes.
	Timeout time.Duration
	// MaxEntries is how many volumes a page has; 0 leaves that to the driver.
	MaxEntries int
	// StuckAfter is the age of a deletion from which on an object counts as stuck.
	StuckAfter time.Duration
	// Settle is the time between the two looks of an audit. What differs in both is
	// reported; what was under way in one of them is not.
	Settle time.Duration
}

// DefaultConfig is what is used where the operator sets nothing.
func DefaultConfig() Config {
	return Config{Timeout: 15 * time.Second, StuckAfter: 10 * time.Minute, Settle: 15 * time.Second}
}

// Validate reports everything that is wrong with c.
func (c Config) Validate() error {
	var errs []error
	for name, d := range map[string]time.Duration{"--timeout": c.Timeout, "--stuck-after": c.StuckAfter, "--settle": c.Settle} {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("%s: must be positive, got %v", name, d))
		}
	}
	if c.MaxEntries < 0 {
		errs = append(errs, fmt.Errorf("--max-entries: must not be negative, got %d", c.MaxEntries))
	}
	return errors.Join(errs...)
}

// Auditor compares one driver with the API server.
type Auditor struct {
	Config Config
	Driver csiclient.Driver
	CSI    Lister
	// World reads what the API server knows.
	World func(context.Context) (ClusterState, error)
}

// Audit is what differs in two looks, and what is stuck. The second look is left out
// where the first finds nothing that could be under way.
func (a Auditor) Audit(ctx context.Context) ([]Finding, error) {
	first, err := a.look(ctx)
	if err != nil {
		return nil, err
	}
	settled := true
	for _, f := range first {
		settled = settled && f.Kind == Stuck
	}
	if settled {
		return first, nil
	}
	select {
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-time.After(a.Config.Settle):
	}
	second, err := a.look(ctx)
	if err != nil {
		return nil, err
	}
	return both(first, second), nil
}

// Lists tells whether the driver can list its volumes, and where they are published.
func (a Auditor) Lists() (volumes, nodes bool) {
	c := a.Driver.Controller
	return c.ListVolumes, c.ListVolumes && c.ListVolumesPublishedNodes
}

// look compares once.
func (a Auditor) look(ctx context.Context) ([]Finding, error) {
	c := comparison{driver: a.Driver.Name, stuckAfter: a.Config.StuckAfter}
	var err error
	if volumes, nodes := a.Lists(); volumes {
		if c.listed.Volumes, err = a.list(ctx); err != nil {
			return nil, err
		}
		c.listed.Nodes = nodes
	}
	if c.world, err = a.World(ctx); err != nil {
		return nil, err
	}
	c.now = time.Now()
	return c.findings(), nil
}

// list reads all pages. The nodes of a volume of which the driver does not say where it is
// published are nil.
func (a Auditor) list(ctx context.Context) (map[string][]string, error) {
	listed, token, seen := map[string][]string{}, "", map[string]bool{}
	for {
		call, cancel := context.WithTimeout(ctx, a.Config.Timeout)
		page, err := a.CSI.ListVolumes(call, &csi.ListVolumesRequest{MaxEntries: int32(a.Config.MaxEntries), StartingToken: token})
		cancel()
		if err != nil {
			return nil, fmt.Errorf("listing the volumes of driver %q from token %q: %w", a.Driver.Name, token, err)
		}
		for _, entry := range page.GetEntries() {
			if id := entry.GetVolume().GetVolumeId(); id != "" {
				listed[id] = nil
				if status := entry.GetStatus(); status != nil {
					listed[id] = append([]string{}, status.GetPublishedNodeIds()...)
				}
			}
		}
		if token = page.GetNextToken(); token == "" {
			return listed, nil
		}
		if seen[token] { // it would go round in circles for ever
			return nil, fmt.Errorf("listing the volumes of driver %q: token %q comes twice, which is an error of the driver", a.Driver.Name, token)
		}
		seen[token] = true
	}
}
