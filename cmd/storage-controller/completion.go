package main

import (
	"github.com/spf13/cobra"

	"github.com/storage-controller/storage-controller/nodecontroller"
)

// completeWords has shells offer the words that can stand somewhere, where there are a few,
// and the names of files only after flags that take one: no argument of a command is a file.
func completeWords(cmd *cobra.Command) {
	if cmd.ValidArgsFunction == nil {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	for name, words := range map[string][]string{
		"output":         {outputText, outputJSON},
		"logging-format": {outputText, outputJSON},
		"controllers":    sections(allRoles()),
		"profile":        nodecontroller.ProfileNames(),
	} {
		if cmd.Flags().Lookup(name) != nil {
			_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)) // it fails for a flag that is not there
		}
	}
	for _, sub := range cmd.Commands() {
		completeWords(sub)
	}
}

// completeObject offers the kinds of objects; their names are with the API server.
func completeObject(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return []cobra.Completion{"pvc", "pv", "va", "node"}, cobra.ShellCompDirectiveNoFileComp
}
