// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
)

func newDoctorCommand() *cobra.Command {
	var output, as string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check driver, permissions, Leases, objects and settings for \"all\"",
		Long: `Check an installation of "all" with the same flags, environment and file: the
driver at its socket, the permissions of each role and feature, the kinds that the
API server serves, the Leases and their holders, sidecars that are replaced, and the
CSIDriver, StorageClasses and nodes of the driver. It changes nothing and reads no
Secrets.

Run it in the pod, where everything can be reached, or anywhere with a kubeconfig:
then --driver-name sets the name of the driver, which is not called, and --as sets the
ServiceAccount whose permissions are checked.

Exit code: 0 no check failed, but there may be warnings; 3 a check failed; 2 usage
error; 1 neither the driver nor the API server answered.`,
		Example: `  kubectl exec -n kube-system deployment/my-csi-controller -c storage-controller -- /storage-controller doctor
  storage-controller doctor --config=/etc/storage-controller.yaml -o json
  storage-controller doctor --driver-name=drv.example.com \
      --leader-election --leader-election-namespace=kube-system --as=kube-system/my-csi-controller`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			return withSettings(cmd, app.All, func(ctx context.Context, c app.Config) error {
				report := doctor.Run(ctx, doctorInput(c, as))
				if err := writeReport(cmd, report, output); err != nil {
					return err
				}
				return verdict(report)
			})
		},
	}
	registerUserFlags(cmd, app.All)
	cmd.Flags().StringVarP(&output, "output", "o", outputText, "text or json")
	cmd.Flags().StringVar(&as, "as", "",
		"ServiceAccount, as NAMESPACE/NAME, or user whose permissions are checked; empty means this process")
	return cmd
}

// verdict returns the exit code of a report as an error.
func verdict(report doctor.Report) error {
	switch failures := report.Count(doctor.Failure); {
	case !report.Reached:
		return errors.New("nothing was checked: neither the driver nor the API server answers")
	case failures > 0:
		return &exitError{fmt.Errorf("%d of %d checks failed", failures, len(report.Checks)), exitFindings}
	}
	return nil
}

// doctorInput returns what doctor examines for a process with c. as is the user whose permissions are checked.
func doctorInput(c app.Config, as string) doctor.Input {
	in := doctor.Input{
		Version: c.Version, CSI: c.DriverConfig(), DriverName: c.DriverName(), Impersonate: serviceAccount(as), Plan: c.Plan,
	}
	if in.DriverName != "" && c.Origin("csi-address") == "" && c.Origin("csi-socket") == "" {
		in.CSI.Address = ""
	}
	config, _, err := kube.UserRESTConfig(c.Common.Kubeconfig, c.Common.Master)
	if err != nil {
		in.ConfigError = err
		return in
	}
	in.Config = kube.ForRole(config, c.Version, "doctor", 0, 0)
	return in
}

// serviceAccount returns the user name of NAMESPACE/NAME. Any other text is a user name already.
func serviceAccount(as string) string {
	if namespace, name, ok := strings.Cut(as, "/"); ok {
		return "system:serviceaccount:" + namespace + ":" + name
	}
	return as
}
