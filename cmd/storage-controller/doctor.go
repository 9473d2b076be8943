// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/storage-controller/storage-controller/csiclient"
	"github.com/storage-controller/storage-controller/election"
	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// doctorOptions are the flags of doctor itself.
type doctorOptions struct {
	output, as, namespace, container string
	printRBAC                        bool
	status                           statusFlags
}

// ownFlags are the names of the flags in [doctorOptions].
var ownFlags = []string{"output", "as", "namespace", "container", "print-rbac",
	"status-url", "status-token-file", "status-ca-file", "status-insecure-skip-tls-verify"}

// processFlags are the other flags that have an effect on the examination of a running process, besides those of logging.
var processFlags = []string{"kubeconfig", "master", "driver-name"}

func newDoctorCommand() *cobra.Command {
	var o doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor [deployment/NAME|statefulset/NAME|daemonset/NAME|-- COMMAND FLAGS]",
		Short: "Check driver, permissions, Leases, objects and settings of a running process, or for \"all\"",
		Long: `Check an installation: the driver at its socket, the permissions of each role and
feature, the kinds that the API server serves, the Leases and their holders, sidecars
that are replaced, and the CSIDriver, StorageClasses and nodes of the driver. It changes
nothing and reads no values of Secrets.

In the container, doctor uses the flags of the running process (process 1); flags that
you set take precedence. Anywhere else, name the workload, or the process with --status-url:
its processes report on /statusz what they do, their findings, and the permissions that
they lack. The pages of a workload are read through the API server, which requires the
permission to get pods/proxy; everything else is read with your kubeconfig. Without a
process or workload, doctor checks for the command and flags after --, or for "all" with
the flags that you set.

--print-rbac prints the missing permissions as ClusterRoles and Roles with bindings for
the ServiceAccount, for kubectl apply -f -.

Exit code: 0 no check failed, but there may be warnings; 3 a check failed; 2 usage
error; 1 neither the driver nor the API server answered, or --print-rbac could not check
a permission.`,
		Example: `  kubectl exec -n kube-system deployment/my-csi-controller -c storage-controller -- /storage-controller doctor
  storage-controller doctor -n kube-system deployment/my-csi-controller
  storage-controller doctor -n kube-system deployment/my-csi-controller --driver-name=drv.example.com --print-rbac
  storage-controller doctor --status-url=http://localhost:8080
  storage-controller doctor --config=/etc/storage-controller.yaml -o json
  storage-controller doctor --driver-name=drv.example.com --leader-election --as=kube-system/my-csi-controller
  storage-controller doctor --as=topolvm-system/topolvm-controller -- topolvm --use-legacy`,
		Args: func(cmd *cobra.Command, args []string) error {
			if isCommand(cmd, args) {
				return nil
			}
			if len(args) == 1 {
				return checkWorkload(args[0])
			}
			return noArguments(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	registerUserFlags(cmd, app.All)
	fs := cmd.Flags()
	fs.StringVarP(&o.output, "output", "o", outputText, "text or json")
	fs.StringVar(&o.as, "as", "",
		"ServiceAccount, as NAMESPACE/NAME, or user whose permissions are checked; empty means that of the process, or yours. "+
			"Without a process, NAMESPACE is also that of the pod")
	fs.StringVarP(&o.namespace, "namespace", "n", "", "namespace of the workload; empty means that of the current context, or of the pod")
	fs.StringVarP(&o.container, "container", "c", "", "container of the workload; empty means the one that runs roles")
	fs.BoolVar(&o.printRBAC, "print-rbac", false, "print the missing permissions for kubectl apply -f -, and no report")
	o.status.add(fs)
	return cmd
}

func (o doctorOptions) run(cmd *cobra.Command, args []string) error {
	if err := checkOutput(o.output); err != nil {
		return err
	}
	command := isCommand(cmd, args)
	if (len(args) == 0 || command) && (o.namespace != "" || o.container != "") {
		return &usageError{errors.New("--namespace, --container: require a workload, such as deployment/NAME")}
	}
	if err := o.status.validate(); err != nil {
		return &usageError{err}
	}
	if len(args) > 0 && o.status.url != "" {
		return &usageError{errors.New("--status-url: names a process, so that no workload or command may be set")}
	}
	if len(args) > 0 && !command || o.status.url != "" {
		return o.examineProcesses(cmd, args)
	}
	line, roles, fs := (*commandLine)(nil), app.All, cmd.Flags()
	var err error
	switch {
	case command:
		adoptNamespace(o.as)
		line, err = parseCommandLine("the command line", append([]string{programName}, args...))
		if line == nil && err == nil {
			err = &usageError{fmt.Errorf("%q: must be a command that runs roles", args[0])}
		}
	default:
		if line, err = containerProcess("/proc"); line == nil {
			adoptNamespace(o.as)
		}
	}
	if err != nil {
		return err
	}
	if line != nil {
		if err := line.override(cmd, ownFlags); err != nil {
			return err
		}
		roles, fs = line.roles, line.flags
	}
	return withFlags(fs, roles, func(ctx context.Context, c app.Config) error {
		in := doctorInput(c, o.as)
		if line != nil {
			in.DriverName = cmp.Or(line.driver, in.DriverName)
			in.Plan = func(driver csiclient.Driver, known bool) doctor.Plan {
				plan := c.Plan(driver, known)
				plan.Findings = slices.Insert(plan.Findings, 0, line.check())
				return plan
			}
		}
		if len(args) > 0 {
			in.CSI.Address = "" // the socket is in another pod
		}
		return o.report(cmd, doctor.Run(ctx, in))
	})
}

// report writes the report, or the missing permissions in it.
func (o doctorOptions) report(cmd *cobra.Command, report doctor.Report) error {
	if o.printRBAC {
		return printRBAC(cmd, report)
	}
	if err := writeReport(cmd, report, o.output); err != nil {
		return err
	}
	return verdict(report)
}

// isCommand reports whether args are those after "--": a command and its flags.
func isCommand(cmd *cobra.Command, args []string) bool {
	return len(args) > 0 && cmd.ArgsLenAtDash() == 0
}

// examineProcesses examines an installation as its running processes report it: that of --status-url, or those of a workload.
func (o doctorOptions) examineProcesses(cmd *cobra.Command, args []string) error {
	logging := settings.NewFlags(new(settings.Logging).AddFlags)
	var errs []error
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains(ownFlags, f.Name) && !slices.Contains(processFlags, f.Name) && logging.Lookup(f.Name) == nil {
			errs = append(errs, fmt.Errorf("--%s: has no effect on a running process. Remove it", f.Name))
		}
	})
	if o.printRBAC && o.status.url != "" {
		errs = append(errs, errors.New("--print-rbac: requires a workload or a command, because any process may answer at --status-url"))
	}
	if o.printRBAC && !cmd.Flags().Changed("driver-name") {
		errs = append(errs, errors.New("--print-rbac: set --driver-name, whose StorageClasses name the secrets to grant"))
	}
	if errs != nil {
		return &usageError{errors.Join(errs...)}
	}
	return withFlags(cmd.Flags(), app.All, func(ctx context.Context, c app.Config) error {
		config, namespace, err := kube.UserRESTConfig(c.Common.Kubeconfig, c.Common.Master)
		if err != nil {
			return err
		}
		in := doctor.Input{Version: c.Version, DriverName: c.DriverName(), Impersonate: serviceAccount(o.as),
			Config: kube.ForRole(config, c.Version, "doctor", 0, 0)}
		var found processes
		if o.status.url != "" {
			found, err = o.status.askURL(ctx, config, o.as == "")
		} else {
			namespace = cmp.Or(o.namespace, namespace, election.Namespace(""))
			found, err = o.askWorkload(ctx, &in, namespace, args[0])
		}
		if err != nil {
			return err
		}
		if found.plan == nil {
			if o.printRBAC {
				return fmt.Errorf("no process answers: %s. To continue, %s", found.checks[0].Message, found.checks[0].Next)
			}
			return o.report(cmd, doctor.Report{Version: c.Version, Time: time.Now().UTC().Truncate(time.Second), Findings: found.checks,
				Reached: true})
		}
		found.plan.Findings = slices.Concat(found.checks, found.plan.Findings)
		in.Process, in.Permissions = found.plan, found.permissions
		return o.report(cmd, doctor.Run(ctx, in))
	})
}

// askWorkload returns what the processes of a workload report.
func (o doctorOptions) askWorkload(ctx context.Context, in *doctor.Input, namespace, object string) (processes, error) {
	w, err := readWorkload(ctx, in.Config, namespace, object, o.container)
	if err != nil {
		return processes{}, err
	}
	found, err := w.ask(ctx, o.as == "")
	in.Namespace = w.object.Namespace
	if p := found.permissions; p != nil {
		if p.User != "" && p.User != w.account() {
			found.checks = append(found.checks, finding.New(finding.Warning, processCheck,
				fmt.Sprintf("the process authenticates as %s, not as %s", p.User, w.account()),
				"remove --kubeconfig and KUBECONFIG from the container, unless this is intended"))
		}
		p.User = w.account() // never an account that only the process names
	}
	return found, err
}

// printRBAC writes the missing permissions in report.
func printRBAC(cmd *cobra.Command, report doctor.Report) error {
	if !report.Reached || report.User == "" {
		return verdict(doctor.Report{Findings: report.Findings})
	}
	unreviewed := report.Unreviewed()
	if len(report.Missing) == 0 {
		if unreviewed == nil {
			fmt.Fprintln(cmd.ErrOrStderr(), "No permission is missing.")
		}
		return unreviewed
	}
	err := report.WriteRBAC(cmd.OutOrStdout())
	if errors.Is(err, doctor.ErrNoServiceAccount) {
		return &usageError{fmt.Errorf("--print-rbac: %w. Set --as=NAMESPACE/NAME, or name a workload", err)}
	}
	return errors.Join(err, unreviewed)
}

// verdict returns the exit code of a report as an error.
func verdict(report doctor.Report) error {
	switch failures := finding.Count(report.Findings, finding.Failing); {
	case !report.Reached:
		return errors.New("nothing was checked: neither the driver nor the API server answers")
	case failures > 0:
		return &exitError{fmt.Errorf("%d of %d checks failed", failures, len(report.Findings)), exitFindings}
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

// adoptNamespace makes the namespace of the ServiceAccount NAMESPACE/NAME that of the pod, unless the environment names one.
func adoptNamespace(as string) {
	namespace, _, found := strings.Cut(as, "/")
	for _, name := range []string{"NAMESPACE", "POD_NAMESPACE"} {
		if found && os.Getenv(name) == "" {
			os.Setenv(name, namespace)
		}
	}
}

// serviceAccount returns the user name of NAMESPACE/NAME. Any other text is a user name already.
func serviceAccount(as string) string {
	if namespace, name, ok := strings.Cut(as, "/"); ok {
		return "system:serviceaccount:" + namespace + ":" + name
	}
	return as
}
