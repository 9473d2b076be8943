// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"github.com/storage-controller/storage-controller/internal/app"
)

// completeWords sets the shell completion of flags with a few possible values. File names are completed only
// after flags that take one: no argument of a command is a file.
func completeWords(cmd *cobra.Command) {
	if cmd.ValidArgsFunction == nil {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	for name, words := range map[string][]string{
		"output":         {outputText, outputJSON},
		"logging-format": {outputText, outputJSON},
		"controllers":    app.All.Names(),
	} {
		if cmd.Flags().Lookup(name) != nil {
			// it fails only for an unknown flag
			_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
		}
	}
	for _, sub := range cmd.Commands() {
		completeWords(sub)
	}
}

// completeObject completes the kinds of objects; completing names would need the API server.
func completeObject(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return []cobra.Completion{"pod", "pvc", "pv", "va", "volumesnapshot", "node"}, cobra.ShellCompDirectiveNoFileComp
}
