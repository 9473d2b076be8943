package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/provisioner"
)

// The outputs of commands that report something.
const (
	outputText = "text"
	outputJSON = "json"
)

func newDoctorCommand() *cobra.Command {
	var output, as string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check what \"all\" would find: driver, permissions, Leases, objects and settings",
		Long: `Check what "all" would find with the same flags, environment and file: the
driver at its socket, the permissions of each role and feature, the kinds of the
API server, the Leases and their holders, old sidecars, and the CSIDriver,
StorageClasses and nodes of the driver. Nothing is changed; secrets are not read.

Run it in the pod, where everything can be reached, or anywhere with a
kubeconfig: then --driver-name tells the name of the driver, whose socket is not
asked, and --as tells whose permissions are checked.

Exit code: 0 everything is well, or there are warnings only; 3 a check has
failed; 2 wrong usage; 1 neither the driver nor the API server could be asked.`,
		Example: `  kubectl exec -n kube-system deployment/my-csi-controller -c storage-controller -- /storage-controller doctor
  storage-controller doctor --config=/etc/storage-controller.yaml -o json
  storage-controller doctor --driver-name=drv.example.com \
      --leader-election --leader-election-namespace=kube-system --as=kube-system/my-csi-controller`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(cmd, output); err != nil {
				return err
			}
			s, err := readSettings(cmd.Flags(), true, allRoles())
			if err != nil {
				return err
			}
			log, flush, err := setUpLogging(s.Common.Logging)
			if err != nil {
				return err
			}
			defer flush()
			ctx, stop := untilSignal(log)
			defer stop()
			report := doctor.Run(ctx, s.doctorInput(cmd.Flags(), as))
			write := report.WriteText
			if output == outputJSON {
				write = report.WriteJSON
			}
			if err := write(cmd.OutOrStdout()); err != nil {
				return err
			}
			return verdict(report)
		},
	}
	registerFlags(cmd.Flags(), commonOptions(true, allRoles()...), allRoleOptions(true))
	forUser(cmd.Flags())
	cmd.Flags().StringVarP(&output, "output", "o", outputText, "text or json")
	cmd.Flags().StringVar(&as, "as", "", "whose permissions are checked: NAMESPACE/NAME of a ServiceAccount, or a user; empty means those of this process")
	return cmd
}

// checkOutput refuses what is no way to write a report.
func checkOutput(cmd *cobra.Command, output string) error {
	if output != outputText && output != outputJSON {
		return &usageError{fmt.Errorf("-o: must be %s or %s, got %q", outputText, outputJSON, output), cmd.UsageString()}
	}
	return nil
}

// verdict is the exit code of a report, as an error.
func verdict(report doctor.Report) error {
	switch failures := report.Count(doctor.Failure); {
	case !report.Reached:
		return errors.New("nothing could be checked: neither the driver nor the API server answers")
	case failures > 0:
		return &exitError{fmt.Errorf("%d of %d checks failed", failures, len(report.Checks)), exitRefused}
	}
	return nil
}

// doctorInput is what there is to examine of a process with s. as is whose permissions
// are checked.
func (s settings) doctorInput(fs *pflag.FlagSet, as string) doctor.Input {
	in := doctor.Input{
		Version: buildVersion(), CSI: s.driverConfig(allRoles()...), DriverName: s.Nodecontroller.Driver(), Impersonate: serviceAccount(as),
		Plan: func(driver csiclient.Driver, known bool) doctor.Plan { return s.plan(fs, driver, known) },
		SecretsOf: func(parameters map[string]string) ([]doctor.Secret, error) {
			of, err := provisioner.ClassSecrets(parameters)
			var secrets []doctor.Secret
			for _, c := range of {
				secrets = append(secrets, doctor.Secret(c))
			}
			return secrets, err
		},
	}
	if in.DriverName != "" && s.origins["csi-address"] == "" && s.origins["csi-socket"] == "" {
		in.CSI.Address = ""
	}
	config, _, err := kube.UserRESTConfig(s.Common.Kubeconfig, s.Common.Master)
	if err != nil {
		in.ConfigError = err
		return in
	}
	in.Config = kube.ForRole(config, buildVersion(), "doctor", 0, 0)
	return in
}

// serviceAccount is the user behind NAMESPACE/NAME; another text is a user already.
func serviceAccount(as string) string {
	if namespace, name, ok := strings.Cut(as, "/"); ok {
		return "system:serviceaccount:" + namespace + ":" + name
	}
	return as
}

// inPod tells whether the API server is that of the pod in which this runs, so that the
// environment is what the roles would have.
func (s settings) inPod() bool {
	return s.Common.Kubeconfig == "" && s.Common.Master == "" && os.Getenv("KUBECONFIG") == "" && os.Getenv("KUBERNETES_SERVICE_HOST") != ""
}
