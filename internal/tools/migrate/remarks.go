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

func (g remarks) add(args *yaml.Node, env []*yaml.Node) {
	g.noteOverlap()
	g.noteAnnotations()
	g.noteLocks()
	g.noteRates()
	g.noteVariables(args, env)
}

// noteOverlap warns about a rollout during which the old and the new pod are both active.
func (g remarks) noteOverlap() {
	if text(get(g.object.node, "kind")) != "Deployment" || text(get(g.object.node, "spec", "strategy", "type")) == "Recreate" {
		return
	}
	var active []string
	for _, s := range g.counted() {
		if !s.on("leader-election") && !s.on("node-deployment") {
			active = append(active, s.name)
		}
	}
	if len(active) > 0 {
		g.must("without --leader-election, the old and the new %s both work during the rollout of a Deployment. "+
			"Set strategy.type to Recreate, or scale the Deployment to 0 and wait until its pods are gone before the rollout",
			enumerate(active))
	}
}

// noteLocks warns about replicas that use another lock than a Lease.
func (g remarks) noteLocks() {
	for _, s := range g.sources {
		if lock := s.get("leader-election-type"); lock != "" && lock != "leases" {
			g.must("leader election always uses Leases, %s used %s. Make sure that no older replica runs at the same time: scale the old "+
				"workload to 0 before the rollout", s.name, lock)
		}
	}
}

// defaultRate is the default limit of requests to the API server per second in the sidecars.
const defaultRate = "5"

// noteRates notes the roles whose requests to the API server are not limited any more.
func (g remarks) noteRates() {
	var names []string
	for _, s := range g.counted() {
		if !s.has("kube-api-qps") && s.kind != topolvm { // its limit depends on its version
			names = append(names, s.name)
		}
	}
	if len(names) > 0 {
		g.changed("the requests of %s to the API server are not limited by default; API Priority and Fairness of the API server applies. "+
			"The default of the sidecars is %s per second. To limit a role, set --kube-api-qps and --kube-api-burst",
			enumerate(names), defaultRate)
	}
}

// variablesOfLibraries are variables that every Go program or its TLS and HTTP libraries read.
var variablesOfLibraries = []string{"GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT", "GOTRACEBACK", "HTTPS_PROXY", "HTTP_PROXY",
	"KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "NO_PROXY", "SSL_CERT_DIR", "SSL_CERT_FILE", "TZ"}

// noteVariables notes the variables that neither an argument refers to nor the program reads.
func (g remarks) noteVariables(args *yaml.Node, env []*yaml.Node) {
	var unused []string
	for _, e := range env {
		name := text(get(e, "name"))
		if slices.Contains(variablesRead, name) || slices.Contains(variablesOfLibraries, strings.ToUpper(name)) ||
			strings.HasPrefix(name, "STORAGE_CONTROLLER_") || refers(args.Content, name) ||
			slices.ContainsFunc(env, func(other *yaml.Node) bool { return refers([]*yaml.Node{get(other, "value")}, name) }) {
			continue
		}
		i := slices.IndexFunc(g.sources, func(s *source) bool { return s.rebuild() != nil && s.rebuild().variable == name })
		if i >= 0 {
			g.info("the variable %s of %s has no effect: %s", name, g.sources[i].name, g.sources[i].rebuild().why)
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
