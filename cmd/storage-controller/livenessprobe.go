// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/storage-controller/storage-controller/internal/app"
)

// newLivenessprobeCommand returns the command that serves the health of the driver. Node pods have no other container
// of this program that could do it.
func newLivenessprobeCommand(name string) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "livenessprobe",
		Short: "Serve the health of the CSI driver (replaces livenessprobe)",
		Args:  strayArguments(name),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if v, _ := cmd.Flags().GetBool("version"); v {
				fmt.Fprintln(cmd.OutOrStdout(), name, buildVersion())
				return nil
			}
			probe, err := app.ReadLivenessprobe(cmd.Flags())
			if err != nil {
				return err
			}
			logs, err := app.SetUpLogging(probe.Common.Logging)
			if err != nil {
				return &app.UsageError{Err: err}
			}
			defer logs.Flush()
			ctx, stop := untilSignal(logs.Log)
			defer stop()
			return probe.Run(ctx, buildVersion())
		},
	}
	app.RegisterLivenessprobe(cmd.Flags())
	return cmd
}
