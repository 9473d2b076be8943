// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/app"
	"github.com/storage-controller/storage-controller/internal/settings"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
	"github.com/storage-controller/storage-controller/internal/tools/migrate"
)

// roleCommands returns the roles of each command that a container may run with the program under a name. Those of topolvm also
// depend on the environment.
func roleCommands(name string) map[string]app.Selection {
	return map[string]app.Selection{
		"all": app.All, "provision": app.Provision, "attach": app.Attach, "resize": app.Resize, "snapshot": app.Snapshot,
		"capacity": app.Capacity, "nodecontroller": app.Nodecontroller, "topolvm": app.Topolvm(name == topolvmController),
	}
}

// commandLine is the command line of a process that doctor inspects.
type commandLine struct {
	source string // where it was found
	roles  app.Selection
	use    string // the name of the command
	flags  *pflag.FlagSet
	driver string   // --driver-name of doctor; "": unknown
	copied string   // the copy of the configuration file, to be removed; "": none
	unread []string // variables whose values are not in the workload
}

// checks returns a check of the source of l, and one of the variables that doctor does not read.
func (l *commandLine) checks() []doctor.Check {
	checks := []doctor.Check{{Name: "process", Status: doctor.OK,
		Message: "the flags are those of " + l.source + ", which runs " + l.use}}
	if len(l.unread) > 0 {
		checks = append(checks, doctor.Check{Name: "environment", Status: doctor.Warning,
			Message: "not read from " + l.source + ": " + strings.Join(l.unread, ", "),
			Hint:    "set the options of these variables as flags of doctor, or run doctor in the container"})
	}
	return checks
}

// parseCommandLine parses argv as the program does. It returns nil if argv is not a command that runs roles.
func parseCommandLine(source string, argv []string) (*commandLine, error) {
	if len(argv) == 0 {
		return nil, nil
	}
	name := filepath.Base(argv[0])
	if _, sidecar := aliases[name]; name != programName && !sidecar {
		return nil, nil
	}
	root := newRoot(name)
	cmd, rest, err := root.Find(arguments(root, name, argv[1:]))
	if err != nil {
		return nil, nil
	}
	roles, ok := roleCommands(name)[cmd.Name()]
	if !ok || cmd.Parent() != root {
		return nil, nil
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return nil, &usageError{fmt.Errorf("flags of %s: %w", source, err)}
	}
	return &commandLine{source: source, roles: roles, use: cmd.Name(), flags: cmd.Flags()}, nil
}

// override sets the flags of l that were given to cmd, and those of logging, which doctor does not take from the process.
func (l *commandLine) override(cmd *cobra.Command, own []string) error {
	var errs []error
	settings.NewFlags(new(settings.Logging).AddFlags).VisitAll(func(f *pflag.Flag) {
		errs = append(errs, l.flags.Set(f.Name, cmd.Flags().Lookup(f.Name).Value.String()))
	})
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if slices.Contains(own, f.Name) {
			return
		}
		if f.Name == "driver-name" { // it is that of doctor, which does not reach the driver
			l.driver = f.Value.String()
			return
		}
		target := l.flags.Lookup(f.Name)
		if target == nil {
			errs = append(errs, &usageError{fmt.Errorf("--%s: %s runs %q, which has no such flag", f.Name, l.source, l.use)})
			return
		}
		value := f.Value.String()
		if list, ok := f.Value.(pflag.SliceValue); ok {
			value = strings.Join(list.GetSlice(), ",")
		}
		errs = append(errs, l.flags.Set(f.Name, value))
	})
	return errors.Join(errs...)
}

// containerProcess returns the command line of the first process of the container, nil if it does not run roles.
// proc is the directory of the proc file system.
func containerProcess(proc string) (*commandLine, error) {
	data, err := os.ReadFile(filepath.Join(proc, "1", "cmdline"))
	if err != nil {
		return nil, nil // another operating system, or no permission
	}
	return parseCommandLine("process 1", strings.Split(strings.TrimSuffix(string(data), "\x00"), "\x00"))
}

// workload is a Deployment, StatefulSet or DaemonSet, one container of which doctor inspects.
type workload struct {
	kind, namespace, name string
	pod                   corev1.PodTemplateSpec
	selector              *metav1.LabelSelector
}

// readWorkload returns the workload that object names as KIND/NAME.
func readWorkload(ctx context.Context, client kubernetes.Interface, namespace, object string) (workload, error) {
	kind, name, _ := strings.Cut(object, "/")
	w := workload{namespace: namespace, name: name}
	var err error
	switch strings.ToLower(kind) {
	case "deployment", "deployments", "deploy":
		o, e := client.AppsV1().Deployments(namespace).Get(ctx, name, metav1.GetOptions{})
		w.kind, err = "deployment", e
		if e == nil {
			w.pod, w.selector = o.Spec.Template, o.Spec.Selector
		}
	case "statefulset", "statefulsets", "sts":
		o, e := client.AppsV1().StatefulSets(namespace).Get(ctx, name, metav1.GetOptions{})
		w.kind, err = "statefulset", e
		if e == nil {
			w.pod, w.selector = o.Spec.Template, o.Spec.Selector
		}
	case "daemonset", "daemonsets", "ds":
		o, e := client.AppsV1().DaemonSets(namespace).Get(ctx, name, metav1.GetOptions{})
		w.kind, err = "daemonset", e
		if e == nil {
			w.pod, w.selector = o.Spec.Template, o.Spec.Selector
		}
	}
	if err != nil {
		return w, fmt.Errorf("reading %s/%s in namespace %s: %w", w.kind, name, namespace, err)
	}
	return w, nil
}

// checkWorkload returns an error unless object is KIND/NAME of a workload.
func checkWorkload(object string) error {
	known := strings.Fields("deployment deployments deploy statefulset statefulsets sts daemonset daemonsets ds")
	kind, name, _ := strings.Cut(object, "/")
	if name == "" || strings.Contains(name, "/") || !slices.Contains(known, strings.ToLower(kind)) {
		return &usageError{fmt.Errorf("%q: must be deployment/NAME, statefulset/NAME or daemonset/NAME", object)}
	}
	return nil
}

// commandLine returns the command line of the container called name, by default of the only one that runs roles,
// and makes its environment that of doctor.
func (w workload) commandLine(ctx context.Context, client kubernetes.Interface, name string) (*commandLine, error) {
	var found []string
	var line *commandLine
	var own map[string]string // the environment of its container
	pod := w.anyPod(ctx, client)
	for _, c := range slices.Concat(w.pod.Spec.InitContainers, w.pod.Spec.Containers) {
		if name != "" && c.Name != name {
			continue
		}
		env := w.environment(pod, c)
		source := fmt.Sprintf("container %s of %s/%s in namespace %s", c.Name, w.kind, w.name, w.namespace)
		argv := containerCommand(c, env, name != "")
		adoptEnvironment(env) // for the defaults of the flags
		l, err := parseCommandLine(source, argv)
		if err != nil {
			return nil, err
		}
		if l == nil {
			continue
		}
		found = append(found, c.Name)
		if len(found) > 1 {
			continue
		}
		line, own = l, env
		line.unread = unread(c, env, argv)
		if err := w.copyConfig(ctx, client, c, l); err != nil {
			return nil, err
		}
	}
	switch {
	case len(found) == 0:
		return nil, fmt.Errorf("%s/%s in namespace %s: no container %sruns roles of storage-controller. Set --container",
			w.kind, w.name, w.namespace, strings.TrimLeft(name+" ", " "))
	case len(found) > 1:
		return nil, &usageError{fmt.Errorf("--container: must be one of %s, which run roles", strings.Join(found, ", "))}
	}
	own["POD_NAMESPACE"] = cmp.Or(own["POD_NAMESPACE"], w.namespace) // arguments do not expand to it
	adoptEnvironment(own)
	return line, nil
}

// imageName matches the last part of the name of an image.
var imageName = regexp.MustCompile(`[^/@:]+(?::[^/@]*)?(?:@.*)?$`)

// containerCommand returns the command line of c. If c has no command, the entrypoint follows from the arguments. If
// the user has named c, it may also be the name of the image: a sidecar of Kubernetes has the same names.
func containerCommand(c corev1.Container, env map[string]string, named bool) []string {
	argv := slices.Concat(c.Command, c.Args)
	if len(c.Command) == 0 {
		entrypoint := ""
		if named {
			entrypoint, _, _ = strings.Cut(imageName.FindString(c.Image), ":")
			entrypoint, _, _ = strings.Cut(entrypoint, "@")
		}
		if len(c.Args) > 0 {
			if _, ok := roleCommands(programName)[c.Args[0]]; ok {
				entrypoint = programName
			}
		}
		argv = append([]string{entrypoint}, argv...)
	}
	for i, arg := range argv {
		argv[i] = migrate.Expand(arg, env)
	}
	return argv
}

// anyPod returns a pod of w, or one without a node if there is none or it cannot be read.
func (w workload) anyPod(ctx context.Context, client kubernetes.Interface) corev1.Pod {
	pods, err := client.CoreV1().Pods(w.namespace).List(ctx, metav1.ListOptions{
		LabelSelector: metav1.FormatLabelSelector(w.selector), Limit: 1,
	})
	if err == nil && len(pods.Items) > 0 {
		return pods.Items[0]
	}
	return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: w.name, Namespace: w.namespace}}
}

// environment returns the variables of c that have a value or refer to a field of pod.
func (w workload) environment(pod corev1.Pod, c corev1.Container) map[string]string {
	fields := map[string]string{
		"metadata.name": pod.Name, "metadata.namespace": pod.Namespace, "spec.nodeName": cmp.Or(pod.Spec.NodeName, "unknown"),
		"spec.serviceAccountName": w.pod.Spec.ServiceAccountName, "metadata.uid": string(pod.UID),
	}
	env := map[string]string{}
	for _, v := range c.Env {
		switch from := v.ValueFrom; {
		case from == nil:
			env[v.Name] = migrate.Expand(v.Value, env)
		case from.FieldRef != nil:
			if value, known := fields[from.FieldRef.FieldPath]; known {
				env[v.Name] = value
			}
		}
	}
	return env
}

// unread returns the variables of c that are not in env, and that its arguments or roles refer to.
func unread(c corev1.Container, env map[string]string, argv []string) []string {
	var names []string
	if len(c.EnvFrom) > 0 {
		names = append(names, "envFrom")
	}
	for _, v := range c.Env {
		_, read := env[v.Name]
		if !read && (ofRoles(v.Name) || strings.Contains(strings.Join(argv, " "), "$("+v.Name+")")) {
			names = append(names, v.Name)
		}
	}
	return names
}

// podVariables are the variables without the prefix of options that roles read.
var podVariables = []string{"POD_NAME", "POD_NAMESPACE", "NAMESPACE", "NODE_NAME", app.LegacyVariable}

// ofRoles reports whether roles read the variable called name.
func ofRoles(name string) bool {
	return strings.HasPrefix(name, settings.EnvPrefix) || slices.Contains(podVariables, name)
}

// adoptEnvironment replaces the variables that roles read by those in env.
func adoptEnvironment(env map[string]string) {
	for _, item := range os.Environ() {
		if name, _, _ := strings.Cut(item, "="); ofRoles(name) {
			os.Unsetenv(name)
		}
	}
	for name, value := range env {
		if ofRoles(name) {
			os.Setenv(name, value)
		}
	}
}

// copyConfig copies the configuration file of l from the ConfigMap that c mounts, and makes --config its copy.
func (w workload) copyConfig(ctx context.Context, client kubernetes.Interface, c corev1.Container, l *commandLine) error {
	file := settings.ConfigFile(l.flags)
	if file == "" {
		return nil
	}
	for _, m := range c.VolumeMounts {
		key, inside := strings.CutPrefix(path.Clean(file), path.Clean(m.MountPath)+"/")
		if m.SubPath != "" {
			key, inside = m.SubPath, path.Clean(file) == path.Clean(m.MountPath)
		}
		i := slices.IndexFunc(w.pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name && v.ConfigMap != nil })
		if !inside || i < 0 {
			continue
		}
		volume := w.pod.Spec.Volumes[i].ConfigMap
		for _, item := range volume.Items {
			if item.Path == key {
				key = item.Key
				break
			}
		}
		object, err := client.CoreV1().ConfigMaps(w.namespace).Get(ctx, volume.Name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("reading --config of %s: %w", l.source, err)
		}
		copied, err := os.CreateTemp("", "storage-controller-*.yaml")
		if err != nil {
			return err
		}
		l.copied = copied.Name()
		_, err = copied.WriteString(object.Data[key])
		return errors.Join(err, copied.Close(), l.flags.Set("config", copied.Name()))
	}
	return &usageError{fmt.Errorf("--config=%s of %s is not in a ConfigMap. Copy the file and set --config to the copy", file, l.source)}
}
