package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
)

// printConfig writes every setting of the nodecontroller as it takes effect, and where it
// comes from. It asks nobody but the driver, and that only for its name where nothing
// else tells it.
func (p *process) printConfig(ctx context.Context, out io.Writer) error {
	driver, err := p.nameOfDriver(ctx)
	if err != nil {
		return err
	}
	cfg, settings, err := p.settings.Nodecontroller.Resolve(driver)
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
