package main

import (
	"errors"
	"fmt"
	"maps"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/nodecontroller"
)

// newConfigCommand shows and checks the configuration of "all".
func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Show or check the configuration", Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return &usageError{errors.New("a subcommand is needed: print or validate"), cmd.UsageString()}
		}}
	printer := &cobra.Command{
		Use: "print", Short: "Print the configuration in effect, as a file for --config", Args: noArguments,
		Long: "Print the configuration that \"all\" would run with, given the same flags, environment and file.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := readSettings(cmd.Flags(), true, allRoles())
			if err != nil {
				return err
			}
			out, err := marshalSettings(s)
			if err == nil {
				_, err = cmd.OutOrStdout().Write(out)
			}
			return err
		},
	}
	validator := &cobra.Command{
		Use: "validate", Short: "Check the configuration and report everything that is wrong", Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := readSettings(cmd.Flags(), true, allRoles())
			if err == nil {
				err = s.validate(allRoles()...)
			}
			if err == nil {
				fmt.Fprintln(cmd.OutOrStdout(), "The configuration is valid.")
			}
			return err
		},
	}
	for _, c := range []*cobra.Command{printer, validator} {
		registerFlags(c.Flags(), commonOptions(true, allRoles()...), allRoleOptions(true))
		cmd.AddCommand(c)
	}
	return cmd
}

// marshalSettings writes s as a configuration file that says the same.
func marshalSettings(s settings) ([]byte, error) {
	values := map[string]any{}
	if err := mapstructure.Decode(s, &values); err != nil {
		return nil, fmt.Errorf("printing the configuration: %w", err)
	}
	values = plain(values).(map[string]any)
	// What a profile or the driver would set counts as set by hand once it is in a file.
	if section, ok := values[nodecontrollerSection].(map[string]any); ok {
		maps.DeleteFunc(section, func(name string, _ any) bool {
			return nodecontroller.MayBePreset(name) && s.Nodecontroller.Explicit[name] == ""
		})
	}
	if s.origins["csi-address"] == "" { // without which a driver may need no connection
		delete(values, "csi-address")
	}
	values["apiVersion"], values["kind"] = configAPIVersion, configKind
	return yaml.Marshal(values)
}

// plain makes durations and the like readable.
func plain(value any) any {
	switch v := value.(type) {
	case map[string]any:
		for k := range v {
			v[k] = plain(v[k])
		}
		return v
	case fmt.Stringer:
		return v.String()
	case pairs:
		return map[string]string(v)
	case gates:
		return map[string]bool(v)
	}
	return value
}
