// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/storage-controller/storage-controller/internal/kubetest"
)

const (
	overlays             = "../../deploy/overlays/"
	chart                = "../../deploy/helm/storage-controller"
	library              = "charts/storage-controller-library/"
	permissionsOfLibrary = library + "templates/rbac/_"
	// exampleNamespace is that of the overlays.
	exampleNamespace = "csi-example"
)

// deploytool is the program of test/deploy, built once: the libraries of kustomize, helm
// and Prometheus are no dependencies of the product.
var deploytool = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "deploytool-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "deploytool")
	cmd := exec.Command("go", "build", "-trimpath", "-o", path, ".")
	cmd.Dir = "../deploy"
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the tool of test/deploy: %w\n%s", err, out)
	}
	return path, nil
})

// tool runs deploytool, and fails with what it says of an error.
func tool(t *testing.T, stdin string, args ...string) (string, error) {
	t.Helper()
	path, err := deploytool()
	if err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(path, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%v: %w\n%s", args, err, &stderr)
	}
	return stdout.String(), nil
}

// kustomized is the objects of a directory of deploy/.
func kustomized(t *testing.T, dir string) []*unstructured.Unstructured {
	t.Helper()
	text, err := tool(t, "", "kustomize", dir)
	if err != nil {
		t.Fatal(err)
	}
	return parsed(t, text)
}

// charted is the objects of the chart with these values, and the driver of the overlays.
func charted(t *testing.T, values string) []*unstructured.Unstructured {
	t.Helper()
	text, err := tool(t, "", "helm", chart, "csi-controller", exampleNamespace, exampleDriver(t), valuesFile(t, values))
	if err != nil {
		t.Fatal(err)
	}
	return parsed(t, text)
}

// exampleDriver is a file with the values that have no default.
func exampleDriver(t *testing.T) string {
	t.Helper()
	return valuesFile(t, "image: {repository: storage-controller, tag: dev}\n"+
		"driver: {name: csi.example.com, image: {repository: csi-driver, tag: dev}}")
}

// chartOnly matches what only the chart adds: prefixes, the names of the webhooks and of the ConfigMap of lost nodes, and the
// driver and the namespace of alerts.
var chartOnly = strings.NewReplacer(
	`"resourceNames":["lost-nodes.topolvm.io"],`, "",
	`{driver_name=\"csi.example.com\"}`, "",
	`namespace=\"csi-example\",`, "",
	`"resourceNames":["lost-nodes.csi.example.com"],`, "",
	"csi-example.csi-controller-", "",
	"csi-controller-webhook", "storage-controller-webhook")

// asOverlay returns the objects of the chart with these values under the names that the overlays have, and without the
// labels and annotations of Helm.
func asOverlay(t *testing.T, values string) []*unstructured.Unstructured {
	t.Helper()
	var all []*unstructured.Unstructured
	driver := "csi.example.com"
	if strings.Contains(values, modeTopolvm) {
		driver = "topolvm.io"
	}
	for _, o := range charted(t, values) {
		if strings.HasSuffix(o.GetName(), "-test") { // for helm test
			continue
		}
		labels := o.GetLabels()
		want := map[string]string{"app.kubernetes.io/instance": "csi-controller", "app.kubernetes.io/managed-by": "Helm",
			"app.kubernetes.io/name": "storage-controller", "app.kubernetes.io/part-of": driver,
			"app.kubernetes.io/version": "dev", "helm.sh/chart": "storage-controller-0.1.0"}
		if diff := cmp.Diff(want, labels); diff != "" {
			t.Errorf("labels of %s %s (- want, + got):\n%s", o.GetKind(), o.GetName(), diff)
		}
		text, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(chartOnly.Replace(string(text))), o); err != nil {
			t.Fatal(err)
		}
		all = append(all, o)
	}
	return all
}

// withoutHelm removes the labels that the overlays give some objects, the annotations and pod labels of the chart, and the certificate
// that Helm creates.
func withoutHelm(objects map[string]map[string]any) map[string]map[string]any {
	maps.DeleteFunc(objects, func(_ string, o map[string]any) bool { return o["type"] == string(corev1.SecretTypeTLS) })
	for _, o := range objects {
		for _, hook := range asSlice(o["webhooks"]) {
			unstructured.RemoveNestedField(hook.(map[string]any), "clientConfig", "caBundle")
		}
		unstructured.RemoveNestedField(o, "metadata", "labels")
		unstructured.RemoveNestedField(o, "spec", "template", "metadata", "annotations")
		settingsAsFlags(o)
		labels, _, _ := unstructured.NestedMap(o, "spec", "template", "metadata", "labels")
		for name := range labels {
			if name != "app.kubernetes.io/name" && name != "app.kubernetes.io/instance" {
				unstructured.RemoveNestedField(o, "spec", "template", "metadata", "labels", name)
			}
		}
	}
	return objects
}

// settingsAsFlags writes settings in the environment of containers as flags, and each flag as one argument. It sorts
// flags, ports and volumes.
func settingsAsFlags(o map[string]any) {
	byName := func(a, b any) int {
		return strings.Compare(fmt.Sprint(a.(map[string]any)["name"]), fmt.Sprint(b.(map[string]any)["name"]))
	}
	containers, _, _ := unstructured.NestedSlice(o, "spec", "template", "spec", "containers")
	volumes, _, _ := unstructured.NestedSlice(o, "spec", "template", "spec", "volumes")
	for _, c := range containers {
		container := c.(map[string]any)
		var flags, env []any
		for _, a := range asSlice(container["args"]) {
			arg := a.(string)
			if last := len(flags) - 1; !strings.HasPrefix(arg, "-") && last >= 0 && strings.HasPrefix(flags[last].(string), "--webhook-") {
				flags[last] = flags[last].(string) + "=" + arg
				continue
			}
			flags = append(flags, arg)
		}
		for _, v := range asSlice(container["env"]) {
			variable := v.(map[string]any)
			name, is := strings.CutPrefix(variable["name"].(string), "STORAGE_CONTROLLER_")
			if !is {
				env = append(env, v)
				continue
			}
			flags = append(flags, "--"+strings.ToLower(strings.ReplaceAll(name, "_", "-"))+"="+variable["value"].(string))
		}
		for i := range flags {
			flags[i] = strings.TrimSuffix(flags[i].(string), "=true")
		}
		slices.SortFunc(flags, func(a, b any) int { return strings.Compare(a.(string), b.(string)) })
		container["args"], container["env"] = flags, env
		if ports := asSlice(container["ports"]); ports != nil {
			slices.SortFunc(ports, byName)
		}
	}
	if containers != nil {
		slices.SortFunc(volumes, byName)
		_ = unstructured.SetNestedSlice(o, volumes, "spec", "template", "spec", "volumes")
		_ = unstructured.SetNestedSlice(o, containers, "spec", "template", "spec", "containers")
	}
}

func asSlice(v any) []any { s, _ := v.([]any); return s }

func valuesFile(t *testing.T, values string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(path, []byte(values), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func parsed(t *testing.T, text string) []*unstructured.Unstructured {
	t.Helper()
	var all []*unstructured.Unstructured
	for decoder := utilyaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096); ; {
		o := &unstructured.Unstructured{}
		if err := decoder.Decode(o); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		if len(o.Object) > 0 {
			all = append(all, o)
		}
	}
}

// byName is objects by what tells them apart. The hash at the end of the name of a
// ConfigMap is that of its maker, and is cut off wherever it stands.
func byName(t *testing.T, all []*unstructured.Unstructured) map[string]map[string]any {
	t.Helper()
	m := map[string]map[string]any{}
	for _, o := range all {
		if o.GetKind() == "Namespace" { // helm makes it with a flag
			continue
		}
		if o.GetKind() == "ConfigMap" {
			o.SetName(strings.TrimRight(o.GetName(), "0123456789abcdefghijklmnopqrstuvwxyz"))
		}
		cutHash(o)
		key := fmt.Sprintf("%s %s/%s", o.GetKind(), o.GetNamespace(), o.GetName())
		if m[key] != nil {
			t.Errorf("%s is there twice", key)
		}
		m[key] = o.Object
	}
	return m
}

func cutHash(o *unstructured.Unstructured) {
	volumes, _, _ := unstructured.NestedSlice(o.Object, "spec", "template", "spec", "volumes")
	for _, v := range volumes {
		if m, is := v.(map[string]any)["configMap"].(map[string]any); is {
			m["name"] = strings.TrimRight(m["name"].(string), "0123456789abcdefghijklmnopqrstuvwxyz")
		}
	}
	if volumes != nil {
		_ = unstructured.SetNestedSlice(o.Object, volumes, "spec", "template", "spec", "volumes")
	}
}

// sameAs is values of the chart by the overlay that they are the same as.
var sameAs = map[string]string{
	"all-in-one": "mode: all-in-one",
	"per-role":   "mode: per-role",
	"node": `mode: node
resources: {requests: {cpu: 10m, memory: 64Mi}, limits: {memory: 256Mi}}`,
	// Defaults of the flags have lower precedence than values.
	"configuration-file": "config: {kind: StorageControllerConfiguration}",
	"topolvm":            modeTopolvm,
}

// modeTopolvm is the values of the mode that serves the driver itself.
const modeTopolvm = "mode: topolvm\ndriver: {name: '', image: {repository: ''}}\n"

// withComponent is the same for overlays with a component.
var withComponent = map[string]string{
	"nodecontroller of per-role": "mode: per-role\nnodecontroller: {enabled: true}",
	"webhooks of all-in-one":     "nodecontroller: {enabled: true, nodeCleanup: \"off\", webhooks: {enabled: true}}",
}

// TestChartAndOverlaysAreTheSame checks that Helm and kustomize install the same objects.
func TestChartAndOverlaysAreTheSame(t *testing.T) {
	t.Parallel()
	dirs, err := filepath.Glob(overlays + "*")
	if err != nil || len(dirs) != len(sameAs) {
		t.Fatalf("%d overlays, %d of them compared: %v", len(dirs), len(sameAs), err)
	}
	for name, values := range sameAs {
		want, got := withoutHelm(byName(t, kustomized(t, overlays+name))), withoutHelm(byName(t, asOverlay(t, values)))
		if name == "configuration-file" { // the order of the keys is another
			for key, o := range maps.All(want) {
				if strings.HasPrefix(key, "ConfigMap") {
					sameText(t, o, got[key])
				}
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (- kustomize, + helm):\n%s", name, diff)
		}
	}
	// The overlay has no DaemonSet, and the chart then no alert about it.
	want, got := withoutHelm(byName(t, withoutAlert(everythingRendered(t), "StorageControllerNodesUnavailable"))),
		withoutHelm(byName(t, asOverlay(t, "priorityAndFairness: {enabled: true}\nadmissionPolicy: {enabled: true}\n"+
			"metrics: {prometheusRule: {enabled: true}, podMonitor: {enabled: true}}")))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("with everything (- kustomize, + helm):\n%s", diff)
	}
	for name, values := range withComponent {
		component, overlay, _ := strings.Cut(name, " of ")
		want := withoutHelm(byName(t, withComponents(t, overlay, "components/"+component)))
		got := withoutHelm(byName(t, asOverlay(t, values)))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (- kustomize, + helm):\n%s", name, diff)
		}
	}
}

// withoutAlert removes an alert from the PrometheusRule among objects.
func withoutAlert(objects []*unstructured.Unstructured, name string) []*unstructured.Unstructured {
	for _, o := range objects {
		if o.GetKind() != "PrometheusRule" {
			continue
		}
		groups, _, _ := unstructured.NestedSlice(o.Object, "spec", "groups")
		for _, g := range groups {
			group := g.(map[string]any)
			group["rules"] = slices.DeleteFunc(asSlice(group["rules"]), func(r any) bool { return r.(map[string]any)["alert"] == name })
		}
		_ = unstructured.SetNestedSlice(o.Object, groups, "spec", "groups")
	}
	return objects
}

// sameText replaces the files of two ConfigMaps by what they say.
func sameText(t *testing.T, objects ...map[string]any) {
	t.Helper()
	for _, o := range objects {
		data, _ := o["data"].(map[string]any)
		for key, text := range data {
			data[key] = parsed(t, text.(string))[0].Object
		}
	}
}

// everythingRendered is an overlay with what can be added to it.
func everythingRendered(t *testing.T) []*unstructured.Unstructured {
	t.Helper()
	return slices.Concat(withComponents(t, "all-in-one", "monitoring"), kustomized(t, "../../deploy/priority-and-fairness"),
		kustomized(t, "../../deploy/admission-policy"))
}

// withComponents is an overlay with further components of deploy/.
func withComponents(t *testing.T, overlay string, components ...string) []*unstructured.Unstructured {
	t.Helper()
	return installed(t, "namespace: "+exampleNamespace, overlay, components...)
}

// installed is withComponents for a kustomization that begins with own.
func installed(t *testing.T, own, overlay string, components ...string) []*unstructured.Unstructured {
	t.Helper()
	root, err := filepath.Abs("../../deploy")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	relative, err := filepath.Rel(dir, root)
	if err != nil {
		t.Fatal(err)
	}
	text := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n" + own + "\nresources:\n- " +
		filepath.Join(relative, "overlays", overlay) + "\ncomponents:\n"
	for _, c := range components {
		text += "- " + filepath.Join(relative, c) + "\n"
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return kustomized(t, dir)
}

// TestChartHasTheFiles compares the files of the chart with those of deploy/: a chart can read
// its own files only. UPDATE=1 copies them.
func TestChartHasTheFiles(t *testing.T) {
	files, err := filepath.Glob("../../deploy/rbac/*/rbac.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	want := map[string]string{}
	for _, file := range files {
		want[permissionsOfLibrary+filepath.Base(filepath.Dir(file))+".tpl"] = file
	}
	for _, name := range []string{"prometheus-rule.yaml", "pod-monitor.yaml"} {
		want[name] = "../../deploy/monitoring/" + name
	}
	want["webhooks.yaml"] = "../../deploy/components/webhooks/webhook.yaml"
	want["admission-policy.yaml"] = "../../deploy/admission-policy/policy.yaml"
	for name, file := range want {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(chart, "files", name)
		if permissions, is := strings.CutPrefix(name, permissionsOfLibrary); is {
			define := fmt.Sprintf("{{- define %q -}}\n", "storage-controller.permissions."+strings.TrimSuffix(permissions, ".tpl"))
			text = fmt.Appendf(nil, "%s%s{{- end }}\n", define, text)
		}
		if strings.HasPrefix(name, library) {
			path = filepath.Join(chart, name)
		}
		if os.Getenv("UPDATE") != "" {
			if err := os.WriteFile(path, text, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if copied, err := os.ReadFile(path); err != nil || !bytes.Equal(copied, text) {
			t.Errorf("%s is not as %s (%v): run make generate", path, file, err)
		}
	}
	copies, err := filepath.Glob(filepath.Join(chart, permissionsOfLibrary+"*"))
	if err != nil || len(copies) != len(files) {
		t.Errorf("%d files in the chart for %d in deploy/rbac: remove the rest", len(copies), len(files))
	}
}

// TestChartRefusesWrongValues: a mistake is told with its place, before anything is installed.
func TestChartRefusesWrongValues(t *testing.T) {
	t.Parallel()
	for values, text := range map[string]string{
		"driver: {name: x}\nnodecontroller: {enabled: true, webhooks: {enabled: true}}": "driver.name must contain a dot",

		"mode: both":                                                       "'/mode'",
		"replica: 3":                                                       "'replica' not allowed",
		"replicaCount: many":                                               "'/replicaCount'",
		"nodecontroller: {nodeCleanup: all}":                               "'/nodecontroller/nodeCleanup'",
		"extraArgs: [all]":                                                 "'/extraArgs/0'",
		"extraArgs: [--worker-treads=2]":                                   "extraArgs: --worker-treads=2: unknown flag",
		"mode: per-role\nextraArgs: [--nope]":                              "extraArgs: --nope: unknown flag",
		"livenessProbe: {period: 3}":                                       "'/livenessProbe'",
		"metrics: {serviceMonitor: {enabled: true}}":                       "set metrics.service.enabled",
		"mode: node\nprovisioner: {enabled: false}":                        "provisioner.enabled",
		"httpPort: 8081":                                                   "httpPort: only mode node",
		"mode: per-role\nconfig: {a: b}":                                   "config: only with mode all-in-one",
		"attacher: {resources: {limits: {memory: 1Gi}}}":                   "attacher.resources: only with mode per-role",
		"fullnameOverride: Not_A_Name":                                     "'/fullnameOverride'",
		"secrets: {namespaces: [\"*\"]}":                                   "'/secrets/namespaces/0'",
		"driver: {name: csi.example.com/x}":                                "'/driver/name'",
		"driver: {port: 1}":                                                "'port' not allowed",
		"image: {repository: 'x@sha256:aa'}":                               "'/image/repository'",
		"image: {digest: aa}":                                              "'/image/digest'",
		"image: {tag: ''}":                                                 "image: set tag or digest",
		"extraContainers: [{name: x}]":                                     "'/extraContainers/0'",
		"extraContainers: [{name: driver, image: x}]":                      "extraContainers[0]: the chart has a container driver",
		"extraVolumes: [{name: more}, {name: socket, emptyDir: {}}]":       "extraVolumes[1]: the chart has a volume socket",
		"config: {nonsense: 5s}":                                           "config.nonsense: unknown key",
		"config: {attacher: {nonsense: 5s}}":                               "config.attacher.nonsense: unknown key",
		"config: {controllers: [attacher]}":                                "set enabled of",
		"image: {repository: ''}":                                          "image.repository: set it",
		"driver: {name: ''}":                                               "driver.name: set it",
		"driver: {image: {repository: ''}}":                                "driver.image.repository: set it",
		"driver: {image: {tag: ''}}":                                       "driver.image: set tag or digest",
		"nodecontroller: {nodeCleanup: claims}":                            "nodeCleanup: nodecontroller.enabled is false",
		"extraArgs: ['--http-endpoint=127.0.0.1:8080']":                    "the probes and ports of the chart have 8080",
		"extraArgs: [--webhook-cert-secret=x]":                             "unknown flag",
		"config: {timeout: 1.5m}":                                          "terminationGracePeriodSeconds, 80, must exceed",
		"config: {node-cleanup: claims}":                                   "node-cleanup: the permissions would not match",
		"config: {nodecontroller: {node-cleanup: claims}}":                 "set nodecontroller.nodeCleanup",
		"extraArgs: [--node-finalizer-mode=manage]":                        "set nodecontroller.nodeFinalizerMode",
		"extraArgs: [--pvc-finalizer-mode=strip]":                          "set nodecontroller.pvcFinalizerMode",
		"extraArgs: ['--node-cleanup-resource=x']":                         "unknown flag",
		modeTopolvm + "extraArgs: [--use-legacy]":                          "set useLegacy",
		modeTopolvm + "extraArgs: ['--csi-socket=/run/x.sock']":            "mode topolvm sets the addresses",
		modeTopolvm + "provisioner: {enabled: false}":                      "provisioner.enabled: mode topolvm runs this role",
		"mode: topolvm":                                                    "driver.name: mode topolvm serves topolvm.io",
		"useLegacy: true":                                                  "useLegacy: only with mode topolvm",
		"nodecontroller: {enabled: true, pvcFinalizerMode: enforce}":       "pvcFinalizerMode: enforce is for mode topolvm only",
		"extraArgs: [--profile=topolvm]":                                   "unknown flag",
		"extraArgs: [--resize-nudge]":                                      "set nodecontroller.resizeNudge",
		"extraArgs: [--enable-webhooks]":                                   "set nodecontroller.webhooks.enabled",
		"extraArgs: [--enable-capacity=false]":                             "set capacity.enabled",
		"extraArgs: [--secure-metrics-server]":                             "set metrics.secure",
		"config: {nodecontroller: {driver-name: other}}":                   "set driver.name",
		"mode: per-role\nmetrics: {secure: true}":                          "metrics.secure: only with mode all-in-one",
		"extraArgs: [--feature-gates=CrossNamespaceVolumeDataSource=true]": "set provisioner.crossNamespace",
		"config: {feature-gates: {CrossNamespaceVolumeDataSource: true}}":  "set provisioner.crossNamespace",
		"config: {leader-election-namespace: other}":                       "the Leases are in the namespace of the release",
		"extraArgs: [--leader-election-namespace=other]":                   "the Leases are in the namespace of the release",
		"config: {leader-election: false}":                                 "config.leader-election: several pods",
		"config: {http-endpoint: ':9090'}":                                 "the probes and ports of the chart have 8080",
		"config: {attacher: {timeout: 5m}}":                                "attacher.timeout: terminationGracePeriodSeconds, 80",
		"extraArgs: [--leader-election=false]":                             "extraArgs: --leader-election=false: several pods",
		"extraArgs: [-leader_election=f]":                                  "several pods",
		"extraArgs: ['--http-endpoint=:9090']":                             "the probes and ports of the chart have 8080",
		"mode: per-role\nextraArgs: ['--driver-health-endpoint=:1']":       "all containers of the pod would serve this address",
		"mode: per-role\nextraArgs: ['--http-endpoint=:8080']":             "8080 to 8084",
		"extraArgs: ['--metrics-address=:9090']":                           "--http-endpoint is set",
		"extraArgs: [--csi-address=/csi/csi.sock]":                         "the socket must be in /run/csi",
		"extraArgs: [--csi-socket=/run/csi/csi.sock]":                      "set csi-address",
		"config: {csi-socket: /run/csi/csi.sock}":                          "config.csi-socket: --csi-address is set",
		"extraArgs: ['--webhook-addr=127.0.0.1:9443']":                     "the ports of the chart have 9443",
		"config: {nodecontroller: {webhook-addr: ':1'}}":                   "config.nodecontroller.webhook-addr: the ports",
		"extraArgs: [--config=/x]":                                         "belong into config",
		"extraArgs: [--timeout=300s]":                                      "terminationGracePeriodSeconds, 80",
		"extraArgs: [--attacher-timeout=70s]":                              "terminationGracePeriodSeconds, 80",
		"extraArgs: [-timeout=70s]":                                        "terminationGracePeriodSeconds, 80",
		"extraArgs: [--resize-timeout=70s]":                                "terminationGracePeriodSeconds, 80",
		"config: {resizer: {modify-timeout: 70s}}":                         "terminationGracePeriodSeconds, 80",
		"terminationGracePeriodSeconds: 25":                                "terminationGracePeriodSeconds: 25",
		"terminationGracePeriodSeconds: 70":                                "must exceed the timeout of the snapshotter",
		"nodecontroller: {webhooks: {caBundle: '-----BEGIN'}}":             "'/nodecontroller/webhooks/caBundle'",
		"mode: node\nnodecontroller: {enabled: true}":                      "mode node has no node controller",
		"mode: per-role\nextraArgs: [--audit-interval=1h]":                 "set STORAGE_CONTROLLER_AUDIT_INTERVAL in env",
		"mode: per-role\nextraArgs: [--strict-topology]":                   "set STORAGE_CONTROLLER_STRICT_TOPOLOGY in env",
		"mode: per-role\nextraArgs: [--provisioner-timeout=5s]":            "only mode all-in-one has --provisioner-timeout",
		"nodecontroller: {enabled: false, webhooks: {enabled: true}}":      "nodecontroller.enabled is false",
		"mode: per-role\nnodecontroller: {enabled: true}\n" +
			"extraArgs: [--node-cleanup=claims]": "set nodecontroller.nodeCleanup",
		"{provisioner: {enabled: false}, attacher: {enabled: false}, resizer: {enabled: false}, snapshotter: {enabled: false}, " +
			"capacity: {enabled: false}, " +
			"nodecontroller: {enabled: false}}": "no role is enabled",
	} {
		_, err := tool(t, "", "helm", chart, "x", exampleNamespace, exampleDriver(t), valuesFile(t, values))
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("values %s: %v, want %q", values, err, text)
		}
	}
	if _, err := tool(t, "", "lint", chart, exampleDriver(t)); err != nil {
		t.Error(err)
	}
}

// TestChartTakesWhatWorks renders values that are close to refused ones.
func TestChartTakesWhatWorks(t *testing.T) {
	t.Parallel()
	for _, values := range []string{
		"extraArgs: [--logtostderr, --stderrthreshold=1, --resync=1m, --vmodule=a=1]",
		"extraArgs: [-v, --timeout=29s, '--http-endpoint=[::]:8080', --csi-address=/run/csi/other.sock, --leader-election]",
		"terminationGracePeriodSeconds: 3700\nextraArgs: [--timeout=1h1m1s, --attacher-timeout=500ms]",
		"mode: node\nextraArgs: [--leader-election=false]",
		"mode: node\nhttpPort: 9080\nkubeletDir: null\nnodeSelector: null\nextraArgs: ['--http-endpoint=:9080']",
		"mode: per-role\nsnapshotter: {enabled: true}\nextraArgs: [--worker-threads=20, --timeout=20s, -v=4]",
		"extraArgs: [--leader-election-namespace=csi-example]",
		"nodecontroller: {enabled: true}\nextraArgs: ['--webhook-addr=0.0.0.0:9443']",
		"terminationGracePeriodSeconds: 101\nconfig: {timeout: 1.5m}\nsecrets: {namespaces: [" + strings.Repeat("n", 63) + "]}",
		"terminationGracePeriodSeconds: 75\nconfig: {timeout: 1m, feature-gates: {Topology: true}, attacher: {timeout: 1.5s}}",
	} {
		if _, err := tool(t, "", "helm", chart, "x", exampleNamespace, exampleDriver(t), valuesFile(t, values)); err != nil {
			t.Errorf("values %s: %v", values, err)
		}
	}
}

// TestChartConfiguration: the program accepts the file, in which there is all that the flags
// would contain, except for values that are set.
func TestChartConfiguration(t *testing.T) {
	t.Parallel()
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	for values, want := range map[string][]string{
		"config: {timeout: 5s}": {"timeout: 5s", "csi-address: /run/csi/csi.sock", "leader-election: true", "http-endpoint: :8080",
			"capacity-ownerref-level: 2", "node-cleanup: \"off\""},
		"config: {capacity: {capacity-ownerref-level: 1}, leader-election: null}\nnodecontroller: {enabled: true, resizeNudge: true}": {
			"capacity-ownerref-level: 1", "resize-nudge: true", "leader-election: true"},
		"config: {csi-address: /run/csi/other.sock, feature-gates: {Topology: true}}": {"csi-address: /run/csi/other.sock",
			"Topology: true"},
		`config: {timeout: 5s}
attacher: {enabled: false}
provisioner: {crossNamespace: true}
nodecontroller: {enabled: true, nodeCleanup: volumes, pvcFinalizerMode: strip, webhooks: {enabled: true, name: "on"}}`: {
			"- -attacher\n", "CrossNamespaceVolumeDataSource: true", "node-cleanup: volumes", "enable-webhooks: true",
			"cert-dir: /certs", "pvc-finalizer-mode: strip"},
	} {
		objects := charted(t, values)
		i := slices.IndexFunc(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == "ConfigMap" })
		text := converted[corev1.ConfigMap](t, objects[i]).Data["config.yaml"]
		file := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		// What the program makes of it, and not how it is written.
		out, err := exec.Command(path, "config", "print", "--config", file).CombinedOutput()
		if valid, no := exec.Command(path, "config", "validate", "--config", file).CombinedOutput(); err != nil || no != nil {
			t.Errorf("values %s: %v, %v: %s%s\nof %s", values, err, no, out, valid, text)
		}
		for _, line := range want {
			if !strings.Contains(string(out), line) {
				t.Errorf("values %s: no %q in\n%s\nof %s", values, line, out, text)
			}
		}
	}
}

// TestChartTakesMoreThanTheDriver: what else a driver needs finds its place in the pod.
func TestChartTakesMoreThanTheDriver(t *testing.T) {
	t.Parallel()
	objects := charted(t, fileOfPage(t, "install.md", "more-values.yaml")+"\npodLabels: {app.kubernetes.io/name: other, a: b}\n")
	spec := podOf(t, objects)
	containers := map[string]corev1.Container{}
	for _, c := range spec.Containers {
		containers[c.Name] = c
	}
	if c := containers["driver"]; len(c.Ports) != 1 || c.LivenessProbe == nil || c.LivenessProbe.HTTPGet.Port.StrVal != c.Ports[0].Name {
		t.Errorf("the driver has %v, %v", c.Ports, c.LivenessProbe)
	}
	if args := containers["storage-controller"].Args; !slices.Contains(args, "--driver-health-endpoint=:9808") {
		t.Errorf("storage-controller has %v", args)
	}
	if c := containers["more"]; !slices.ContainsFunc(c.VolumeMounts,
		func(m corev1.VolumeMount) bool { return m.Name == "socket" && m.MountPath == "/run/csi" }) {
		t.Errorf("the sidecar has %v", c.VolumeMounts)
	}
	for _, o := range objects {
		switch o.GetKind() {
		case "ServiceAccount":
			if len(o.GetAnnotations()) != 1 {
				t.Errorf("the ServiceAccount has %v", o.GetAnnotations())
			}
		case "Deployment":
			if d := converted[appsv1.Deployment](t, o); d.Spec.Template.Labels["a"] != "b" ||
				!selects(t, d.Spec.Selector, d.Spec.Template.Labels) {
				t.Errorf("the pod has %v", d.Spec.Template.Labels)
			}
		}
	}
	objects = charted(t, `image: {tag: v2}
podSecurityContext: {runAsUser: 0}
securityContext: {readOnlyRootFilesystem: false}
env: [{name: HTTPS_PROXY, value: "http://proxy:3128"}]
envFrom: [{configMapRef: {name: proxy}}]
extraVolumeMounts: [{name: ca, mountPath: /ca}]
extraVolumes: [{name: ca, emptyDir: {}}]
metrics: {secure: true}`)
	spec = podOf(t, objects)
	tested := testPod(t, objects).Spec
	if c := tested.Containers[0]; !cmp.Equal(tested.SecurityContext, spec.SecurityContext) ||
		!cmp.Equal(c.SecurityContext, spec.Containers[0].SecurityContext) || !cmp.Equal(c.EnvFrom, spec.Containers[0].EnvFrom) ||
		!slices.Contains(c.Env, corev1.EnvVar{Name: "HTTPS_PROXY", Value: "http://proxy:3128"}) ||
		len(c.VolumeMounts) != 1 || len(tested.Volumes) != 1 || tested.Volumes[0].Name != "ca" {
		t.Errorf("the pod of helm test has %v, %v, %v, %v, %v", tested.SecurityContext, c.SecurityContext, c.Env, c.EnvFrom, c.VolumeMounts)
	}
	for _, c := range spec.Containers {
		if c.Name == "driver" {
			continue
		}
		env := slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == "HTTPS_PROXY" && e.Value == "http://proxy:3128" })
		mounted := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "ca" && m.MountPath == "/ca" })
		if !env || !mounted || c.Image != "storage-controller:v2" ||
			*c.SecurityContext.ReadOnlyRootFilesystem || c.SecurityContext.Capabilities == nil ||
			*spec.SecurityContext.RunAsUser != 0 || spec.SecurityContext.RunAsNonRoot != nil {
			t.Errorf("%s has %v, %v, %s, %v, %v", c.Name, c.Env, c.VolumeMounts, c.Image, c.SecurityContext, spec.SecurityContext)
		}
		if !slices.Contains(c.Args, "--secure-metrics-server") || c.LivenessProbe.HTTPGet.Scheme != "HTTPS" ||
			c.ReadinessProbe.HTTPGet.Scheme != "HTTPS" {
			t.Errorf("%s has %v, %v", c.Name, c.Args, c.LivenessProbe)
		}
	}
	digest := "sha256:" + strings.Repeat("0a", 32)
	for _, c := range podOf(t, charted(t, "image: {digest: '"+digest+"'}")).Containers {
		if c.Name != "driver" && c.Image != "storage-controller@"+digest {
			t.Errorf("the image is %s", c.Image)
		}
	}
}

// TestLibraryHasValuesOfTheChart compares the defaults of the library with those of the chart.
func TestLibraryHasValuesOfTheChart(t *testing.T) {
	t.Parallel()
	values := func(file string) (all map[string]any) {
		text, err := os.ReadFile(filepath.Join(chart, file))
		if err == nil {
			err = yaml.Unmarshal(text, &all)
		}
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	var compare func(place string, library, chart map[string]any)
	compare = func(place string, library, chart map[string]any) {
		for key, value := range library {
			inner, is := value.(map[string]any)
			if outer, too := chart[key].(map[string]any); is && too && len(inner) > 0 {
				compare(place+key+".", inner, outer)
			} else if diff := cmp.Diff(chart[key], value); diff != "" {
				t.Errorf("%s%s (- chart, + library):\n%s", place, key, diff)
			}
		}
	}
	compare("", values(library+"values.yaml"), values("values.yaml"))
}

// TestChartFollowsSettings looks for texts in the objects of a kind.
func TestChartFollowsSettings(t *testing.T) {
	t.Parallel()
	for values, want := range map[string][2]string{
		"metrics: {podMonitor: {enabled: true}}\nextraArgs: [--metrics-path=/m]\nconfig: {metrics-path: /n}": {"PodMonitor",
			`"podMetricsEndpoints":[{"path":"/m","port":"http"}`},
		"metrics: {podMonitor: {enabled: true}}":                   {"PodMonitor", `"podMetricsEndpoints":[{"port":"http"}`},
		"metrics: {service: {enabled: true, annotations: {a: b}}}": {"Service", `"ports":[{"name":"http","port":8080,"targetPort":"http"}]`},
		"mode: per-role\nmetrics: {service: {enabled: true}}":      {"Service", `"name":"http-attach","port":8081,"targetPort":"http-attach"`},
		"metrics: {secure: true, service: {enabled: true}, serviceMonitor: {enabled: true, tokenSecret: {name: token, key: k}}}": {
			"ServiceMonitor", `"endpoints":[{"authorization":{"credentials":{"key":"k","name":"token"}},"port":"http","scheme":"https"`},
		"deploymentAnnotations: {a: b}":                {"Deployment", `"annotations":{"a":"b"}`},
		"revisionHistoryLimit: 0":                      {"Deployment", `"revisionHistoryLimit":0`},
		"updateStrategy: {type: Recreate}":             {"Deployment", `"strategy":{"type":"Recreate"}`},
		"mode: node\nupdateStrategy: {type: OnDelete}": {"DaemonSet", `"updateStrategy":{"type":"OnDelete"}`},
		"dnsConfig: {nameservers: [192.0.2.1]}":        {"Deployment", `"dnsConfig":{"nameservers":["192.0.2.1"]}`},
		"verbosity: 4":                                 {"Deployment", `"--v=4"`},
		"livenessProbe: {periodSeconds: 99}":           {"Deployment", `"periodSeconds":99,"timeoutSeconds":5`},
		"readinessProbe: {failureThreshold: 7}":        {"Deployment", `"failureThreshold":7,"httpGet":{"path":"/readyz"`},
		"podDisruptionBudget: {maxUnavailable: 50%}":   {"PodDisruptionBudget", `"maxUnavailable":"50%"`},
		"podDisruptionBudget: {minAvailable: 1}":       {"PodDisruptionBudget", `"spec":{"minAvailable":1,"selector"`},
		"extraObjects: [{apiVersion: v1, kind: Lease, metadata: {name: '{{ .Release.Name }}-x'}}]": {"Lease", `-x"`},
	} {
		var all strings.Builder
		for _, o := range charted(t, values) {
			if text, err := json.Marshal(o); err != nil {
				t.Fatal(err)
			} else if o.GetKind() == want[0] {
				all.Write(text)
			}
		}
		if !strings.Contains(all.String(), want[1]) {
			t.Errorf("values %s: no %s among\n%s", values, want[1], &all)
		}
	}
}

// TestChartInAnotherNamespace: no object, and no reference to one, has the namespace of the release.
func TestChartInAnotherNamespace(t *testing.T) {
	t.Parallel()
	for _, values := range []string{
		"nodecontroller: {enabled: true, webhooks: {enabled: true}}\nadmissionPolicy: {enabled: true}\nnetworkPolicy: {enabled: true}",
		"mode: per-role\nmetrics: {podMonitor: {enabled: true}, prometheusRule: {enabled: true}, service: {enabled: true}}",
		"priorityAndFairness: {enabled: true}\nconfig: {v: 3}",
	} {
		for _, o := range charted(t, values+"\nnamespaceOverride: other") {
			if text, err := json.Marshal(o); err != nil || strings.Contains(string(text), exampleNamespace) {
				t.Errorf("%v: %s", err, text)
			}
		}
	}
}

// TestEveryValueHasADescription: editors show the descriptions of the schema.
func TestEveryValueHasADescription(t *testing.T) {
	t.Parallel()
	type schema struct {
		Description string
		Properties  map[string]schema
	}
	text, err := os.ReadFile(filepath.Join(chart, "values.schema.json"))
	var all schema
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range all.Properties {
		if value.Description == "" {
			t.Errorf("%s has no description", name)
		}
		for inner, field := range value.Properties {
			if field.Description == "" && name != "livenessProbe" && name != "readinessProbe" {
				t.Errorf("%s.%s has no description", name, inner)
			}
		}
	}
}

// TestWebhookCertificate: the pod mounts the Secret of the certificate where --cert-dir says, and nothing else does.
func TestWebhookCertificate(t *testing.T) {
	t.Parallel()
	for values, secret := range map[string]string{
		"{enabled: true}": "",
		"{enabled: true, webhooks: {enabled: true}}":                                            "csi-controller-webhook-certificates",
		"{enabled: true, webhooks: {enabled: true, name: own, caBundle: YQ==}}\nmode: per-role": "own-certificates",
	} {
		objects := charted(t, "nodecontroller: "+values)
		pod, mounted := podOf(t, objects), ""
		for _, v := range pod.Volumes {
			if v.Name == "certificate" {
				mounted = v.Secret.SecretName
			}
		}
		if mounted != secret {
			t.Errorf("%s: the volume has the Secret %q, want %q", values, mounted, secret)
		}
		for _, c := range pod.Containers {
			enabled := slices.Contains(c.Args, "--enable-webhooks")
			there := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/certs" })
			if enabled != there || slices.Contains(c.Args, "--cert-dir=/certs") != there {
				t.Errorf("%s: container %s: mounted %t, arguments %q", values, c.Name, there, c.Args)
			}
		}
		for _, o := range objects {
			if o.GetKind() != "MutatingWebhookConfiguration" {
				continue
			}
			bundle := converted[admissionv1.MutatingWebhookConfiguration](t, o).Webhooks[0].ClientConfig.CABundle
			if (string(bundle) == "a") != strings.Contains(values, "caBundle") {
				t.Errorf("%s: caBundle %q", values, bundle)
			}
		}
	}
}

// TestResourcesOfARole: they are those of its container, and the others have the common ones.
func TestResourcesOfARole(t *testing.T) {
	t.Parallel()
	roles := []string{"provisioner", "attacher", "resizer", "snapshotter", "nodecontroller"}
	for _, role := range roles {
		values := "mode: per-role\nnodecontroller: {enabled: true}\n"
		if role == "nodecontroller" {
			values = "mode: per-role\nnodecontroller: {enabled: true, resources: {limits: {memory: 1Gi}}}"
		} else {
			values += role + ": {resources: {limits: {memory: 1Gi}}}"
		}
		seen := 0
		for _, c := range podOf(t, charted(t, values)).Containers {
			if !slices.Contains(roles, c.Name) {
				continue
			}
			want := "512Mi"
			if seen++; c.Name == role {
				want = "1Gi"
			}
			if got := c.Resources.Limits.Memory().String(); got != want {
				t.Errorf("resources of %s: container %s has the limit %s, want %s", role, c.Name, got, want)
			}
		}
		if seen != len(roles) {
			t.Errorf("%d containers", seen)
		}
	}
}

// TestReleasesShareNothing installs the chart with its defaults for several drivers.
func TestReleasesShareNothing(t *testing.T) {
	t.Parallel()
	owner := map[string]string{}
	for _, release := range [][2]string{{"a", "one"}, {"b", "one"}, {"a", "two"}, {"my-storage-controller", "two"}} {
		values := valuesFile(t, "image: {repository: x, tag: v1}\n"+
			"driver: {name: "+release[0]+"."+release[1]+".example.com, image: {repository: x, tag: v1}}\n"+
			"priorityAndFairness: {enabled: true}\nadmissionPolicy: {enabled: true}\nnetworkPolicy: {enabled: true}\n"+
			"metrics: {prometheusRule: {enabled: true}, podMonitor: {enabled: true}}\n"+
			"nodecontroller: {enabled: true, webhooks: {enabled: true}}")
		text, err := tool(t, "", "helm", chart, release[0], release[1], values)
		if err != nil {
			t.Fatal(err)
		}
		for name := range byName(t, parsed(t, text)) {
			if owner[name] != "" {
				t.Errorf("%s is in the releases %s and %v", name, owner[name], release)
			}
			owner[name] = strings.Join(release[:], " of ")
		}
	}
}

// TestChartNotes compares the notes after an installation with the installed objects.
func TestChartNotes(t *testing.T) {
	t.Parallel()
	for values, texts := range map[string][]string{
		"":                           {"rollout status deployment/csi-controller"},
		"mode: node\nhttpPort: 9080": {"rollout status daemonset/csi-controller", "localhost:9080", "another release"},
		"secrets: {cluster: true}":   {"can read Secrets in all namespaces"},
		modeTopolvm:                  {"for the driver topolvm.io", "deletes PVCs of deleted nodes."},
		"nodecontroller: {enabled: true, nodeCleanup: claims}": {
			"deletes PVCs of deleted nodes, if the PVC or its StorageClass opts in."},
		"nodecontroller: {enabled: true, nodeCleanup: volumes, nodeCleanupScope: all}": {"deletes PVCs of deleted nodes."},
	} {
		notes, err := tool(t, "", "notes", chart, "csi-controller", exampleNamespace, exampleDriver(t), valuesFile(t, values))
		for _, text := range texts {
			if err != nil || !strings.Contains(notes, text) {
				t.Errorf("values %q: %v, notes %s, want %q", values, err, notes, text)
			}
		}
	}
}

// variants is everything that is shipped, rendered.
func variants(t *testing.T) map[string][]*unstructured.Unstructured {
	t.Helper()
	all := map[string][]*unstructured.Unstructured{
		"examples":                   kustomized(t, "../../deploy/examples"),
		"all-in-one with everything": everythingRendered(t),
		"chart, features": charted(t, `prefix: "second:"
fullnameOverride: second
nameOverride: other
commonLabels: {team: storage}
image: {pullPolicy: Always}
secrets: {cluster: true}
provisioner: {crossNamespace: true}
nodecontroller: {enabled: true, nodeFinalizerMode: manage, nodeCleanup: volumes, pvcFinalizerMode: strip, nodeDeleteGrace: 1m,
  resizeNudge: true, webhooks: {enabled: true}}
priorityAndFairness: {enabled: true}
extraArgs: [-v=2]
podAnnotations: {a: b}
nodeSelector: {a: b}
tolerations: [{key: a, operator: Exists}]
affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}]}]}}}
imagePullSecrets: [{name: s}]
podSecurityContext: {runAsUser: 1000, runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
env: [{name: GOMEMLIMIT, value: 400MiB}]
envFrom: [{configMapRef: {name: proxy}}]
extraVolumeMounts: [{name: more, mountPath: /more}]
metrics: {secure: true, podMonitor: {enabled: true, labels: {a: b}, tokenSecret: {name: scraper, key: token}}}
driver:
  command: [/driver]
  env: [{name: A, value: b}]
  envFrom: [{secretRef: {name: d}}]
  lifecycle: {preStop: {exec: {command: [/stop]}}}
  volumeMounts: [{name: more, mountPath: /more}]
initContainers: [{name: first, image: x}]
extraVolumes: [{name: more, emptyDir: {}}]
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
startupProbe: {httpGet: {path: /readyz, port: http}, failureThreshold: 30}
topologySpreadConstraints:
- topologyKey: kubernetes.io/hostname
  maxSkew: 2
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: &pods {matchLabels: {app.kubernetes.io/instance: csi-controller}}
- {topologyKey: topology.kubernetes.io/zone, maxSkew: 1, whenUnsatisfiable: ScheduleAnyway, labelSelector: *pods}
networkPolicy: {enabled: true, metricsFrom: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]}
admissionPolicy: {enabled: true}
serviceAccount: {name: second-account}`),
		"chart, webhooks of another": charted(t, `fullnameOverride: second
driver: {name: Other.example.com}
nodecontroller: {enabled: true, webhooks: {enabled: true, name: second, caBundle: YQ==, clientCA: /etc/clients/ca.crt, failurePolicy: Fail, namespaces: [default], configurationAnnotations: {a: b}}}`),
		"all-in-one with a file and webhooks": withComponents(t, "configuration-file", "components/webhooks"),
		"chart, more than the driver":         charted(t, fileOfPage(t, "install.md", "more-values.yaml")),
		"chart, node on the host's network": charted(t, "mode: node\nhostNetwork: true\nhttpPort: 9080\nkubeletDir: /var/lib/k0s/kubelet\n"+
			"networkPolicy: {enabled: true, metricsFrom: [{namespaceSelector: {}}]}"),
		"chart, TopoLVM": charted(t, modeTopolvm+"useLegacy: true\nmetrics: {secure: true}\nsnapshotter: {enabled: false}\n"+
			"nodecontroller: {pvcFinalizerMode: enforce, webhooks: {enabled: true}}"),
		"chart, capacity alone":    charted(t, capacityAlone),
		"chart, secrets elsewhere": charted(t, "secrets: {namespaces: [default]}"),
	}
	for name := range sameAs {
		all[name] = kustomized(t, overlays+name)
		all["chart, "+name] = charted(t, sameAs[name])
	}
	for name, values := range withComponent {
		component, overlay, _ := strings.Cut(name, " of ")
		all[name], all["chart, "+name] = withComponents(t, overlay, "components/"+component), charted(t, values)
	}
	return all
}

// TestWhatIsShippedIsAccepted has the API server judge every object, strictly, and keep none.
func TestWhatIsShippedIsAccepted(t *testing.T) {
	t.Parallel()
	cp := sharedControlPlane(t)
	kubetest.InstallCRDs(t, cp)
	installMonitoringKinds(t, cp)
	makeExampleNamespace(t, cp)
	for name, objects := range variants(t) {
		for _, o := range objects {
			if o.GetKind() == "Namespace" {
				continue
			}
			if err := dryRun(t.Context(), cp, o); err != nil {
				t.Errorf("%s: %s %s: %v", name, o.GetKind(), o.GetName(), err)
			}
		}
	}
}

// dryRun applies o on the side of the server, without effect.
func dryRun(ctx context.Context, cp *kubetest.ControlPlane, o *unstructured.Unstructured) error {
	body, err := o.MarshalJSON()
	if err != nil {
		return err
	}
	client := cp.Client().Discovery()
	resources, err := client.ServerResourcesForGroupVersion(o.GetAPIVersion())
	if err != nil {
		return fmt.Errorf("%s is not served: %w", o.GetAPIVersion(), err)
	}
	i := slices.IndexFunc(resources.APIResources, func(r metav1.APIResource) bool {
		return r.Kind == o.GetKind() &&
			!strings.Contains(r.Name, "/")
	})
	if i < 0 {
		return fmt.Errorf("%s has no kind %s", o.GetAPIVersion(), o.GetKind())
	}
	path := "/apis/" + o.GetAPIVersion()
	if !strings.Contains(o.GetAPIVersion(), "/") {
		path = "/api/" + o.GetAPIVersion()
	}
	if namespaced := resources.APIResources[i].Namespaced; namespaced != (o.GetNamespace() != "") {
		return fmt.Errorf("namespaced is %v, and the namespace is %q", namespaced, o.GetNamespace())
	} else if namespaced {
		path += "/namespaces/" + o.GetNamespace()
	}
	return client.RESTClient().Patch("application/apply-patch+yaml").AbsPath(path, resources.APIResources[i].Name, o.GetName()).
		Param("fieldManager", "test").Param("force", "true").Param("dryRun", "All").Param("fieldValidation",
		"Strict").Body(body).Do(ctx).Error()
}

// restricted is a namespace that enforces the strictest of the Pod Security Standards.
func restricted(t *testing.T, cp *kubetest.ControlPlane) string {
	t.Helper()
	ns := kubetest.Namespace(t, cp)
	labelled, err := cp.Client().CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	labelled.Labels["pod-security.kubernetes.io/enforce"] = "restricted"
	if _, err := cp.Client().CoreV1().Namespaces().Update(t.Context(), labelled, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	return ns
}

// TestShippedPodsAreRestricted: a namespace that enforces the strictest of the Pod Security
// Standards takes the pods, but for those on every node, which mount the socket from the host.
func TestShippedPodsAreRestricted(t *testing.T) {
	t.Parallel()
	cp := sharedControlPlane(t)
	ctx, ns := t.Context(), restricted(t, cp)
	for name := range sameAs {
		pod := podOf(t, kustomized(t, overlays+name))
		if s := pod.SecurityContext; s.SeccompProfile == nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault ||
			pod.HostNetwork || pod.HostPID || pod.HostIPC {
			t.Errorf("%s: the pod has %v, or is in namespaces of the host", name, s)
		}
		for _, c := range pod.Containers {
			s := c.SecurityContext
			if !*s.ReadOnlyRootFilesystem || *s.AllowPrivilegeEscalation ||
				!slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || s.Capabilities.Add != nil {
				t.Errorf("%s: container %s may do more than it needs: %v", name, c.Name, s)
			}
			token := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "kube-api-access" })
			if token != (c.Name != "driver") || *pod.AutomountServiceAccountToken {
				t.Errorf("%s: container %s has the token: %v", name, c.Name, token)
			}
			if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() {
				t.Errorf("%s: container %s requests nothing", name, c.Name)
			}
			if ours := c.Name != "driver"; ours != (c.LivenessProbe != nil && c.ReadinessProbe != nil &&
				c.Resources.Limits.Memory().Sign() > 0) {
				t.Errorf("%s: container %s lacks probes or a limit", name, c.Name)
			}
		}
		_, err := cp.Client().CoreV1().Pods(ns).Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: pod},
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		switch {
		case name == "node" && (err == nil || !strings.Contains(err.Error(), "hostPath")):
			t.Errorf("%s: %v, want a refusal because of its hostPath", name, err)
		case name != "node" && err != nil && !strings.Contains(err.Error(), "serviceaccount"):
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestDeploymentsStayAvailable: two replicas, apart from one another, of which a drain takes one.
func TestDeploymentsStayAvailable(t *testing.T) {
	t.Parallel()
	for name, objects := range variants(t) {
		var workload *appsv1.Deployment
		var budget *policyv1.PodDisruptionBudget
		file := ""
		for _, o := range objects {
			switch o.GetKind() {
			case "Deployment":
				workload = converted[appsv1.Deployment](t, o)
			case "ConfigMap":
				file = fmt.Sprint(o.Object["data"])
			case "PodDisruptionBudget":
				budget = converted[policyv1.PodDisruptionBudget](t, o)
			}
		}
		if workload == nil {
			if budget != nil {
				t.Errorf("%s: a budget, and no Deployment", name)
			}
			continue
		}
		if *workload.Spec.Replicas != 2 {
			t.Errorf("%s: %d replicas", name, *workload.Spec.Replicas)
		}
		labels := labels.Set(workload.Spec.Template.Labels)
		if budget == nil || budget.Spec.MaxUnavailable.IntValue() != 1 || !selects(t, budget.Spec.Selector, labels) {
			t.Errorf("%s: the budget of the pods is %+v", name, budget)
		}
		spread := map[string]bool{}
		for _, c := range workload.Spec.Template.Spec.TopologySpreadConstraints {
			spread[c.TopologyKey] = selects(t, c.LabelSelector, labels)
		}
		if !spread[corev1.LabelHostname] || !spread[corev1.LabelTopologyZone] {
			t.Errorf("%s: the replicas are apart by %v", name, spread)
		}
		for _, c := range workload.Spec.Template.Spec.Containers {
			if ours := strings.HasPrefix(c.Image, "storage-controller"); ours && !slices.Contains(c.Args, "--leader-election") &&
				!strings.Contains(file, "leader-election: true") {
				t.Errorf("%s: two replicas of container %s without a Lease: %q", name, c.Name, c.Args)
			}
		}
	}
}

func selects(t *testing.T, by *metav1.LabelSelector, set labels.Set) bool {
	t.Helper()
	selector, err := metav1.LabelSelectorAsSelector(by)
	if err != nil {
		t.Fatal(err)
	}
	return !selector.Empty() && selector.Matches(set)
}

func converted[T any](t *testing.T, o *unstructured.Unstructured) *T {
	t.Helper()
	var typed T
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, &typed, true); err != nil {
		t.Fatalf("%s %s: %v", o.GetKind(), o.GetName(), err)
	}
	return &typed
}

// TestSecretsAreOnlyGot checks that no role may list secrets, and those of a namespace are open only where
// that was asked for. In the chart, ConfigMaps have a name.
func TestSecretsAreOnlyGot(t *testing.T) {
	t.Parallel()
	for name, objects := range variants(t) {
		readers, everywhere, places := map[string]bool{}, false, map[string]bool{}
		for _, o := range objects {
			switch o.GetKind() {
			case "ClusterRole", "Role":
				for _, r := range converted[rbacv1.ClusterRole](t, o).Rules { // which has the fields of a Role as well
					lost := []string{"lost-nodes." + strings.ToLower(driverOf(objects))}
					if slices.Contains(r.Resources, "configmaps") && strings.HasPrefix(name, "chart") &&
						!slices.Equal(r.ResourceNames, lost) && !slices.Equal(r.Verbs, []string{"create"}) {
						t.Errorf("%s: %s grants %v on ConfigMaps %q, want %q", name, o.GetName(), r.Verbs, r.ResourceNames, lost)
					}
					if !slices.ContainsFunc(r.Resources, func(s string) bool { return s == "*" || strings.HasPrefix(s, "secrets") }) {
						continue
					}
					readers[o.GetName()] = true
					if !slices.Equal(r.Verbs, []string{"get"}) {
						t.Errorf("%s: %s %s grants %v on secrets", name, o.GetKind(), o.GetName(), r.Verbs)
					}
				}
			}
		}
		for _, o := range objects {
			if ref, _, _ := unstructured.NestedString(o.Object, "roleRef", "name"); readers[ref] {
				everywhere = everywhere || o.GetKind() == "ClusterRoleBinding"
				places[o.GetNamespace()] = true
			}
		}
		switch got := slices.Sorted(maps.Keys(places)); {
		case everywhere != (name == "chart, features"):
			t.Errorf("%s: secrets of all namespaces can be read: %v", name, everywhere)
		case name == "chart, secrets elsewhere" && !slices.Equal(got, []string{exampleNamespace, "default"}):
			t.Errorf("%s: secrets can be read in %q", name, got)
		case len(readers) > 0 && len(got) == 0:
			t.Errorf("%s: the permission to read secrets is bound nowhere", name)
		}
	}
}

// driverOf is the name of the driver in the labels of the chart.
func driverOf(objects []*unstructured.Unstructured) string {
	return objects[0].GetLabels()["app.kubernetes.io/part-of"]
}

// podOf is that of the Deployment or DaemonSet.
func podOf(t *testing.T, objects []*unstructured.Unstructured) corev1.PodSpec {
	t.Helper()
	for _, o := range objects {
		template, found, err := unstructured.NestedMap(o.Object, "spec", "template", "spec")
		if err != nil {
			t.Fatal(err)
		}
		if !found {
			continue
		}
		var spec corev1.PodSpec
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(template, &spec, true); err != nil {
			t.Fatal(err)
		}
		return spec
	}
	t.Fatal("there is no pod")
	return corev1.PodSpec{}
}

func makeExampleNamespace(t *testing.T, cp *kubetest.ControlPlane) {
	t.Helper()
	_, err := cp.Client().CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: exampleNamespace}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cp.Client().CoreV1().Namespaces().Delete(context.WithoutCancel(t.Context()), exampleNamespace, metav1.DeleteOptions{})
	})
}
