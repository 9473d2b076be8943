// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/storage-controller/storage-controller/internal/app"
)

// newConfigCommand returns the command that prints or validates the configuration of "all".
func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Print or validate the configuration", Args: noArguments,
		RunE: func(*cobra.Command, []string) error {
			return &usageError{errors.New("a subcommand is required: print or validate")}
		}}
	printer := &cobra.Command{
		Use: "print", Short: "Print the effective configuration as a file for --config", Args: noArguments,
		Long: "Print the configuration that \"all\" uses with the same flags, environment and file. It is printed with wrong " +
			"values, too; the exit code is 2 then.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := app.All.Read(cmd.Flags(), buildVersion())
			if err != nil {
				return &app.UsageError{Err: err}
			}
			out, err := c.File()
			if err == nil {
				_, err = cmd.OutOrStdout().Write(out)
			}
			if err != nil {
				return err
			}
			if err := c.Enabled().Validate(); err != nil {
				return &app.UsageError{Err: err}
			}
			return nil
		},
	}
	validator := &cobra.Command{
		Use: "validate", Short: "Validate the configuration and report every error", Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := app.All.Read(cmd.Flags(), buildVersion())
			if err == nil {
				err = c.Enabled().Validate()
			}
			if err != nil {
				return &app.UsageError{Err: err}
			}
			fmt.Fprintln(cmd.OutOrStdout(), "The configuration is valid.")
			return nil
		},
	}
	for _, c := range []*cobra.Command{printer, validator} {
		app.All.Register(c.Flags())
		cmd.AddCommand(c)
	}
	return cmd
}

// printConfig writes the effective value and the origin of every setting of the nodecontroller. It calls the
// driver only for its name, and only if the settings do not contain the name.
func printConfig(ctx context.Context, c app.Config, out io.Writer) error {
	driver, err := c.AskDriverName(ctx)
	if err != nil {
		return err
	}
	values, err := c.NodecontrollerValues(driver)
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "NAME\tVALUE\tORIGIN")
	for _, v := range values {
		fmt.Fprintf(table, "%s\t%s\t%s\n", v.Name, v.Value, v.Origin)
	}
	return table.Flush()
}
