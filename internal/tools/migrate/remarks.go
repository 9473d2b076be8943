// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// remarks are the notes about what the manifest around a new container means for it.
type remarks struct{ *group }

func (g remarks) add(env []*yaml.Node) {
	g.noteOverlap()
	g.noteAnnotations()
	g.noteRates()
	g.noteWorkers()
	g.noteAttributes()
	g.noteVariables(env)
}

// noteOverlap warns about a rollout during which the old and the new pod are both active.
func (g remarks) noteOverlap() {
	strategy := text(get(g.object.node, "spec", "strategy", "type"))
	if !g.elects() && text(get(g.object.node, "kind")) == "Deployment" && strategy != "Recreate" &&
		!g.sources[0].on(g.m.Tables, "node-deployment") {
		g.must("without --leader-election the old and the new pod are both active during the rollout of a Deployment. " +
			"Set strategy.type to Recreate, or scale the Deployment to 0 before the rollout")
	}
}

// noteRates notes which limits of requests to the API server have changed.
func (g remarks) noteRates() {
	const defaultRate = "5" // of the sidecars
	rate, limited := "", false
	for _, f := range g.after {
		if f.name == "kube-api-qps" {
			rate, limited = f.value, true
		}
	}
	var before, values []string
	for _, s := range g.counted() {
		if s.kind == topolvm { // its limit depends on its version
			continue
		}
		f, set := s.lookup("kube-api-qps")
		if !set {
			f.value = defaultRate
		}
		if f.value != rate {
			before, values = append(before, s.name+" "+f.value), append(values, f.value)
		}
	}
	if !limited && len(slices.Compact(slices.Clone(values))) == 1 {
		before = []string{values[0] + " for each sidecar"}
		if len(values) == 1 {
			before = []string{values[0]}
		}
	}
	switch {
	case len(before) == 0:
	case limited:
		g.changed("--kube-api-qps=%s applies to each role. The limits of requests per second to the API server were: %s",
			rate, strings.Join(before, ", "))
	default:
		g.changed("requests to the API server are not limited by default; API Priority and Fairness of the API server applies. "+
			"The limits of requests per second were: %s. To limit each role, set --kube-api-qps and --kube-api-burst",
			strings.Join(before, ", "))
	}
}

// noteWorkers notes that more volumes are attached at the same time.
func (g remarks) noteWorkers() {
	for _, s := range g.sources {
		if _, set := s.lookup("worker-threads"); !set && s.kind == csiAttacher {
			name := "worker-threads"
			if g.command == "all" {
				name = roles[s.kind] + "-" + name
			}
			g.changed("the attacher makes up to 100 calls to the driver at the same time, where %s made 10. "+
				"To keep that limit, set --%s=10", s.name, name)
		}
	}
}

// noteAttributes notes that VolumeAttributesClasses of claims have an effect.
func (g remarks) noteAttributes() {
	named := slices.ContainsFunc(g.sources, func(s *source) bool { return s.namesGate(attributesClass) })
	if g.attributes && !named {
		g.changed("if the driver reports MODIFY_VOLUME, the VolumeAttributesClasses of claims are applied, as with csi-provisioner v6 and "+
			"csi-resizer v2. To ignore them, set --feature-gates=%s=false", attributesClass)
	}
}

// variablesOfLibraries are variables that every Go program or its TLS and HTTP libraries read.
var variablesOfLibraries = []string{"GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT", "GOTRACEBACK", "HTTPS_PROXY", "HTTP_PROXY",
	"KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "NO_PROXY", "SSL_CERT_DIR", "SSL_CERT_FILE", "TZ"}

// noteVariables notes the variables that neither a flag refers to nor the program reads.
func (g remarks) noteVariables(env []*yaml.Node) {
	var unused []string
	for _, e := range env {
		name := text(get(e, "name"))
		refers := func(value string) bool { return strings.Contains(value, "$("+name+")") }
		if slices.Contains(variablesRead, name) || slices.Contains(variablesOfLibraries, strings.ToUpper(name)) ||
			strings.HasPrefix(name, "STORAGE_CONTROLLER_") ||
			slices.ContainsFunc(g.after, func(f setting) bool { return refers(f.value) }) ||
			slices.ContainsFunc(env, func(other *yaml.Node) bool { return refers(text(get(other, "value"))) }) {
			continue
		}
		unused = append(unused, name)
	}
	if len(unused) > 0 {
		g.changed("no flag refers to the environment variables %s, and storage-controller does not read them. Find out whether the "+
			"sidecar was patched to read them; otherwise remove them", enumerate(unused))
	}
}

// noteAnnotations warns about annotations of the pod that name a removed container.
func (g remarks) noteAnnotations() {
	annotations := get(g.object.node, "spec", "template", "metadata", "annotations")
	for i := 0; annotations != nil && i+1 < len(annotations.Content); i += 2 {
		key, value := annotations.Content[i].Value, annotations.Content[i+1].Value
		for _, s := range g.sources {
			switch {
			case s.name == g.name:
			case value == s.name && strings.HasPrefix(key, "kubectl.kubernetes.io/default-"):
				g.must("the annotation %s names %s, which was removed. Set it to %s", key, s.name, g.name)
			case key == "container.apparmor.security.beta.kubernetes.io/"+s.name:
				g.must("the annotation %s names %s, which was removed: the API server rejects the pod. "+
					"Remove the annotation or replace its last part with %s", key, s.name, g.name)
			}
		}
	}
}
