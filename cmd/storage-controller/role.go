// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/workloop"
)

// newRoleCommand returns the command that runs roles.
func newRoleCommand(use, name, short string, roles app.Selection) *cobra.Command {
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  strayArguments(name),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if v, _ := cmd.Flags().GetBool("version"); v {
				fmt.Fprintln(cmd.OutOrStdout(), name, buildVersion())
				return nil
			}
			return withSettings(cmd, roles, func(ctx context.Context, c app.Config) error {
				c = c.Enabled()
				if err := errors.Join(c.Validate(), c.ValidateEnvironment()); err != nil {
					return &app.UsageError{Err: err}
				}
				if print, _ := cmd.Flags().GetBool("print-config"); print {
					return printConfig(ctx, c, cmd.OutOrStdout())
				}
				for _, name := range app.All.Options().UnknownVariables(os.Environ()) {
					klog.FromContext(ctx).Info("No setting has the name of this environment variable. Correct it", "variable", name)
				}
				return c.Run(ctx)
			})
		},
	}
	roles.Register(cmd.Flags())
	return cmd
}

// withSettings reads the settings of a command, sets up logging, and calls do with a context that ends at the
// first SIGTERM or SIGINT.
func withSettings(cmd *cobra.Command, roles app.Selection, do func(context.Context, app.Config) error) error {
	return withFlags(cmd.Flags(), roles, do)
}

// withFlags is [withSettings] for the flags in fs.
func withFlags(fs *pflag.FlagSet, roles app.Selection, do func(context.Context, app.Config) error) error {
	c, err := roles.Read(fs, buildVersion())
	if err != nil {
		return &app.UsageError{Err: err}
	}
	logs, err := app.SetUpLogging(c.Common.Logging)
	if err != nil {
		return &app.UsageError{Err: err}
	}
	c.Logs = logs
	defer logs.Flush()
	ctx, stop := untilSignal(logs.Log)
	defer stop()
	return do(ctx, c)
}

// untilSignal returns a context that ends at the first SIGTERM or SIGINT, so that running operations are
// completed. A second signal exits at once.
func untilSignal(log logr.Logger) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(klog.NewContext(context.Background(), log))
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		for s := range signals {
			if ctx.Err() != nil {
				log.Info("Second signal, exiting at once", "signal", s.String())
				os.Exit(exitFailure)
			}
			log.Info("Shutting down: completing running operations", "signal", s.String())
			cancel(fmt.Errorf("received %v: %w", s, workloop.ErrDrain))
		}
	}()
	return ctx, func() { signal.Stop(signals); close(signals) }
}

// registerUserFlags adds the flags of "all" or of a role to a command that a person runs.
func registerUserFlags(cmd *cobra.Command, roles app.Selection) {
	roles.Register(cmd.Flags())
	cmd.Flags().Lookup("kubeconfig").Usage = settings.UserKubeconfigUsage
}

// The formats of reports.
const (
	outputText = "text"
	outputJSON = "json"
)

// report is the result of a command.
type report interface {
	Text() string
}

// writeReport writes r to the output of cmd.
func writeReport(cmd *cobra.Command, r report, output string) error {
	if output == outputJSON {
		return finding.WriteJSON(cmd.OutOrStdout(), r)
	}
	_, err := io.WriteString(cmd.OutOrStdout(), r.Text())
	return err
}

// checkOutput returns an error for an unknown format of reports.
func checkOutput(output string) error {
	if output != outputText && output != outputJSON {
		return &usageError{fmt.Errorf("--output: must be %s or %s, got %q", outputText, outputJSON, output)}
	}
	return nil
}
