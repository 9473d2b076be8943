package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/prometheus/client_golang/prometheus"
)

// printConfig writes every setting of the nodecontroller as it takes effect, and where it
// comes from. It asks nobody but the driver, and that only for its name where nothing
// else tells it.
func (p *process) printConfig(ctx context.Context, out io.Writer) error {
	cfg := p.settings.Nodecontroller
	driver := cfg.Driver()
	if driver == "" {
		ctx, cancel := context.WithTimeout(ctx, p.settings.driverConfig(p.roles...).Timeout)
		defer cancel()
		csi, answer, err := p.connect(ctx, prometheus.NewRegistry(), &diagnostics{})
		if csi != nil {
			defer csi.Close()
		}
		if err != nil {
			return fmt.Errorf("asking the driver for its name, which --driver-name would tell: %w", err)
		}
		driver = answer.Name
	}
	cfg, settings, err := cfg.Resolve(driver)
	if err != nil {
		return err
	}
	if err := cfg.Validate(); err != nil {
		return &usageError{err: err}
	}
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "NAME\tVALUE\tORIGIN")
	for _, s := range settings {
		fmt.Fprintf(table, "%s\t%s\t%s\n", s.Name, s.Value, s.Origin)
	}
	return table.Flush()
}
