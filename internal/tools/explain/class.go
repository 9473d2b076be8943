// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// explainClass reports whether the class of a claim without a volume can provision one.
func explainClass(e *explanation) {
	claim, name, class := e.claim.Value, storagehelpers.GetPersistentVolumeClaimClass(e.claim.Value), e.class.Value
	switch {
	case name == "" && claim.Spec.StorageClassName != nil:
		e.waiting("class",
			"storageClassName is empty: no volume is provisioned; the claim binds only to an existing PersistentVolume without a class.").
			SetNext("Create a PersistentVolume that matches the claim, or recreate the claim with a storageClassName.")
	case name == "":
		explainDefaultClass(e)
	case e.class.Missing:
		e.blocked("class", "StorageClass %q not found.", name).
			SetNext("Create StorageClass %q, or recreate the claim with an existing StorageClass.", name)
	case !e.class.Found:
	case class.Provisioner == storagehelpers.NotSupportedProvisioner:
		e.waiting("class", "StorageClass %q does not provision volumes (provisioner %s).", name, class.Provisioner).
			SetNext("Create a PersistentVolume of StorageClass %q that matches the claim%s.", name, e.alsoAPod())
	default:
		explainProvisioner(e, class)
	}
}

// alsoAPod returns what else a claim needs for which no pod is scheduled.
func (f *facts) alsoAPod() string {
	if f.waitsForPod() {
		return ", unless there is one, and a pod that uses the claim"
	}
	return ", unless there is one"
}

func explainDefaultClass(e *explanation) {
	if name := kube.DefaultClass(e.classes.Value); name != nil {
		e.waiting("class", "storageClassName is not set; StorageClass %q is the default.", *name).
			SetNext("kube-controller-manager assigns StorageClass %q to the claim.", *name)
		return
	}
	if e.classes.Found {
		e.blocked("class", "storageClassName is not set, and the cluster has no default StorageClass.").
			SetNext("Mark a StorageClass as default (annotation %s=true), or recreate the claim with a storageClassName.",
				kube.AnnotationDefaultClass)
	}
}

func explainProvisioner(e *explanation, class *storagev1.StorageClass) {
	mode := "Immediate"
	if kube.WaitsForFirstConsumer(class) {
		mode = "WaitForFirstConsumer: the volume is provisioned after a pod that uses the claim is scheduled"
	}
	e.ok("class", "StorageClass %q: provisioner %s, volumeBindingMode %s.", class.Name, class.Provisioner, mode)
	ann := e.claim.Value.Annotations
	if owner := ann[storagehelpers.AnnStorageProvisioner]; owner != "" && ann[storagehelpers.AnnMigratedTo] == "" &&
		owner != class.Provisioner && owner != migration.DriverOf(class.Provisioner) {
		e.blocked("class",
			"The claim is assigned to provisioner %s, but StorageClass %q has provisioner %s: neither provisions the volume.",
			owner, class.Name, class.Provisioner).SetNext("Recreate the claim.")
	}
	if len(class.AllowedTopologies) > 0 {
		explainAllowedTopologies(e, class)
	}
	if _, err := volumerules.SecretTemplates(class.Parameters); err != nil {
		e.blocked("class", "StorageClass %q has invalid secret parameters: %s", class.Name, sentence(err.Error())).
			SetNext("Recreate StorageClass %q with valid parameters.", class.Name)
	} else if e.secretsErr != nil {
		e.blocked("class", "The secrets of StorageClass %q cannot be resolved for the claim: %s", class.Name,
			sentence(e.secretsErr.Error())).
			SetNext("Add the annotations that the templates name to the claim. If a template is wrong, recreate StorageClass %q.",
				class.Name)
	}
}

// explainAllowedTopologies reports whether the selected node, or any node, is in the allowedTopologies of class.
func explainAllowedTopologies(e *explanation, class *storagev1.StorageClass) {
	selector, text := allowedTopologies(class.AllowedTopologies)
	nodes := e.nodes
	if e.node.Found {
		nodes = apiread.Found([]*corev1.Node{e.node.Value})
	}
	matching := len((&facts{nodes: nodes}).nodesMatching(selector))
	switch {
	case !nodes.Found:
		e.unknown("topology", "allowedTopologies of StorageClass %q: %s; the matching nodes are unknown.", class.Name, text)
	case e.node.Found && matching == 0:
		e.blocked("topology",
			"Selected node %q does not match allowedTopologies of StorageClass %q: %s.", e.node.Value.Name, class.Name, text).
			SetNext("Label node %q to match, or recreate StorageClass %q with other allowedTopologies.", e.node.Value.Name, class.Name)
	case e.node.Found:
		e.ok("topology", "Selected node %q matches allowedTopologies of StorageClass %q: %s.", e.node.Value.Name, class.Name, text)
	case matching == 0:
		e.blocked("topology", "No node matches allowedTopologies of StorageClass %q: %s.", class.Name, text).
			SetNext("Label nodes to match, or recreate StorageClass %q with other allowedTopologies.", class.Name)
	default:
		e.ok("topology",
			"%s of %d match allowedTopologies of StorageClass %q: %s.", finding.Plural(matching, "node"), len(nodes.Value), class.Name,
			text)
	}
}

// allowedTopologies returns terms as a node selector and as text.
func allowedTopologies(terms []corev1.TopologySelectorTerm) (*corev1.NodeSelector, string) {
	s := &corev1.NodeSelector{}
	for _, t := range terms {
		var term corev1.NodeSelectorTerm
		for _, x := range t.MatchLabelExpressions {
			r := corev1.NodeSelectorRequirement{Key: x.Key, Operator: corev1.NodeSelectorOpIn, Values: x.Values}
			term.MatchExpressions = append(term.MatchExpressions, r)
		}
		s.NodeSelectorTerms = append(s.NodeSelectorTerms, term)
	}
	return s, selectorText(s)
}

// selectorText returns s in the notation of label selectors.
func selectorText(s *corev1.NodeSelector) string {
	var terms []string
	for _, t := range s.NodeSelectorTerms {
		var all []string
		for _, x := range t.MatchExpressions {
			all = append(all, x.Key+" "+strings.ToLower(string(x.Operator))+" ("+strings.Join(x.Values, ", ")+")")
		}
		terms = append(terms, strings.Join(all, " and "))
	}
	return strings.Join(terms, ", or ")
}

// explainSecrets reports whether the referenced Secrets exist.
func explainSecrets(e *explanation) {
	for _, s := range e.secrets {
		var parameters []string
		for _, p := range s.purposes {
			parameters = append(parameters, p.NameParameter())
		}
		name, purposes := s.Namespace+"/"+s.Name, strings.Join(parameters, ", ")
		switch {
		case s.object.Found:
			e.ok("secret", "Secret %s (%s) exists.", name, purposes)
		case s.object.Missing && slices.ContainsFunc(s.purposes, e.needsSecret):
			e.blocked("secret", "Secret %s (%s) not found.", name, purposes).
				SetNext("Create Secret %s with the keys that the driver requires.", name)
		case s.object.Missing:
			e.waiting("secret", "Secret %s (%s) not found; nothing waits for it now.", name, purposes).
				SetNext("Create Secret %s with the keys that the driver requires, before it is needed.", name)
		}
	}
}

// needsSecret reports whether the next operation on the volume waits for the Secret of a purpose.
func (f *facts) needsSecret(p volumerules.Purpose) bool {
	if !f.volume.Found {
		return p == volumerules.Provisioner
	}
	switch p {
	case volumerules.Provisioner: // DeleteVolume is called without it
		return false
	case volumerules.ControllerPublish:
		return f.attaches()
	case volumerules.NodeStage, volumerules.NodePublish:
		return f.volume.Value.Status.Phase == corev1.VolumeBound
	}
	return f.claim.Found && resizing(f.claim.Value)
}
