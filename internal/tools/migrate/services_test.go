// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"strings"
	"testing"
)

// TestObjectsThatNamePorts migrates two sidecars with a port for metrics each. The second port is not served any more.
func TestObjectsThatNamePorts(t *testing.T) {
	t.Parallel()
	withPort := func(name, endpoint, port string) string {
		return sidecar(name, "--http-endpoint="+endpoint) + "        ports: [{name: " + port + ", containerPort: " + endpoint[1:] + "}]\n"
	}
	pods := strings.Replace(deployment(withPort("csi-provisioner", ":8080", "p"), withPort("csi-attacher", ":8081", "a")), "  template:\n",
		"  template:\n    metadata: {labels: {app: d}, annotations: {prometheus.io/port: \"ANNOTATED\"}}\n", 1)
	service := func(ports string) string {
		return "---\nkind: Service\nmetadata: {name: s}\nspec: {selector: {app: d}, ports: [" + ports + "]}\n"
	}
	for name, tt := range map[string]struct{ object, annotation, want string }{
		"none":                   {"", "8080", ""},
		"a Service of the first": {service("{port: 80, targetPort: 8080}"), "", ""},
		"a Service by number": {service("{port: 80, targetPort: 8081}"), "",
			"targetPort of Service s is 8081, which is not served any more. Set it to p,"},
		"a Service by name":            {service("{port: 80, targetPort: a}"), "", "targetPort of Service s is a,"},
		"a Service without targetPort": {service("{port: 8081}"), "", "port of Service s is 8081,"},
		"another targetPort":           {service("{port: 8081, targetPort: 8080}"), "", ""},
		"a Service of other pods":      {strings.Replace(service("{port: 8081}"), "app: d", "app: e", 1), "", ""},
		"in another namespace": {strings.Replace(service("{port: 8081}"), "{name: s}", "{name: s, namespace: n}", 1), "",
			"port of Service s"}, // the Deployment may be applied to any namespace
		"a ServiceMonitor": {"---\nkind: ServiceMonitor\nmetadata: {name: m}\nspec: {endpoints: [{targetPort: 8081}]}\n", "",
			"targetPort of ServiceMonitor m is 8081,"},
		"a PodMonitor": {"---\nkind: PodMonitor\nmetadata: {name: m}\nspec: {selector: {matchLabels: {app: d}}, " +
			"podMetricsEndpoints: [{port: a}]}\n", "", "port of PodMonitor m is a,"},
		"a NetworkPolicy": {"---\nkind: NetworkPolicy\nmetadata: {name: n}\nspec: {podSelector: {matchLabels: {app: d}}, " +
			"ingress: [{ports: [{port: 8081}]}]}\n", "", "port of NetworkPolicy n is 8081,"},
		"an annotation": {"", "8081", "the annotation prometheus.io/port of Deployment d is 8081,"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := migrated(t, strings.Replace(pods, "ANNOTATED", tt.annotation, 1)+tt.object, false)
			var have []string
			for _, n := range r.Notes {
				if n.Level == Required && strings.Contains(n.Text, "not served any more") {
					have = append(have, n.Text)
				}
			}
			if all := strings.Join(have, "\n"); (all == "") != (tt.want == "") || !strings.Contains(all, tt.want) {
				t.Errorf("notes %q, want %q", all, tt.want)
			}
		})
	}
}
