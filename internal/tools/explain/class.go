package explain

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	storagehelpers "k8s.io/component-helpers/storage/volume"

	"github.com/storage-controller/storage-controller/internal/migration"
)

// annDefault marks the class of claims that name none.
const annDefault = "storageclass.kubernetes.io/is-default-class"

// aboutClass is whether a claim without a volume has a class by which it can get one.
func (f *facts) aboutClass() findings {
	var l findings
	claim, name := f.claim.value, storagehelpers.GetPersistentVolumeClaimClass(f.claim.value)
	switch {
	case name == "" && claim.Spec.StorageClassName != nil:
		l.add(Waiting, "class", admin+" makes a PersistentVolume without a class that fits, or "+lower(ownerOf)+" makes the claim anew with a class.",
			"The claim asks for no class (storageClassName is empty), so that no volume is made for it: it waits for a PersistentVolume that somebody makes by hand.")
	case name == "":
		f.aboutDefaultClass(&l)
	case f.class.why != "":
		l.add(Unknown, "class", "", "StorageClass %q: %s.", name, f.class.why)
	case f.class.absent():
		l.add(Blocked, "class", admin+" creates StorageClass "+fmt.Sprintf("%q", name)+", or "+lower(ownerOf)+" deletes the claim and makes it anew with one that exists.",
			"StorageClass %q does not exist.", name)
	case f.class.value.Provisioner == noProvisioner:
		l.add(Waiting, "class", admin+fmt.Sprintf(" makes a PersistentVolume of StorageClass %q that fits.", name),
			"StorageClass %q makes no volumes (%s): the claim waits for a PersistentVolume that somebody makes by hand.", name, noProvisioner)
	default:
		f.aboutUsableClass(&l, f.class.value)
	}
	return l
}

func (f *facts) aboutDefaultClass(l *findings) {
	if f.classes.why != "" {
		l.add(Unknown, "class", "", "The claim names no class; whether there is a default one is %s.", f.classes.why)
		return
	}
	for _, c := range f.classes.value {
		if c.Annotations[annDefault] == "true" {
			l.add(Waiting, "class", fmt.Sprintf("kube-controller-manager gives the claim the default StorageClass %q.", c.Name),
				"The claim names no class, and will get the default one, %q.", c.Name)
			return
		}
	}
	l.add(Blocked, "class", admin+" marks a StorageClass as the default ("+annDefault+"=true), or "+lower(ownerOf)+" makes the claim anew with a class.",
		"The claim names no class, and the cluster has no default one.")
}

func (f *facts) aboutUsableClass(l *findings, class *storagev1.StorageClass) {
	mode := "Immediate: the volume is made at once"
	if isLate(class) {
		mode = "WaitForFirstConsumer: the volume is made once a pod that uses the claim has a node"
	}
	l.add(Fine, "class", "", "StorageClass %q is of %s; its binding mode is %s.", class.Name, class.Provisioner, mode)
	owner := f.claim.value.Annotations[storagehelpers.AnnStorageProvisioner]
	if owner != "" && owner != class.Provisioner && owner != migration.DriverOf(class.Provisioner) && f.claim.value.Annotations[storagehelpers.AnnMigratedTo] == "" {
		l.add(Blocked, "class", ownerOf+" deletes the claim and makes it anew.",
			"The claim was given to provisioner %s, and StorageClass %q is of %s by now: neither makes a volume.", owner, class.Name, class.Provisioner)
	}
	if len(class.AllowedTopologies) > 0 {
		f.aboutAllowed(l, class)
	}
	if f.secretsErr != nil {
		l.add(Blocked, "class", admin+fmt.Sprintf(" makes StorageClass %q anew with other parameters.", class.Name),
			"The secrets that StorageClass %q names cannot be used: %s", class.Name, sentence(f.secretsErr.Error()))
	}
}

func isLate(class *storagev1.StorageClass) bool {
	return class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
}

// aboutAllowed is which nodes a class allows; the selected one is what matters, if any.
func (f *facts) aboutAllowed(l *findings, class *storagev1.StorageClass) {
	selector := selectorOf(class.AllowedTopologies)
	text := termsText(class.AllowedTopologies)
	if f.node.found {
		if ok, err := corev1helpers.MatchNodeSelectorTerms(f.node.value, selector); err == nil && !ok {
			l.add(Blocked, "topology", admin+fmt.Sprintf(" labels node %q, or allows its topology in a new StorageClass.", f.node.value.Name),
				"allowedTopologies of StorageClass %q are %s, and the selected node %q has none of them.", class.Name, text, f.node.value.Name)
			return
		}
		l.add(Fine, "topology", "", "The selected node %q is in the allowedTopologies of StorageClass %q: %s.", f.node.value.Name, class.Name, text)
		return
	}
	if !f.nodes.found {
		l.add(Unknown, "topology", "", "allowedTopologies of StorageClass %q are %s.", class.Name, text)
		return
	}
	n := 0
	for i := range f.nodes.value {
		if ok, err := corev1helpers.MatchNodeSelectorTerms(&f.nodes.value[i], selector); err == nil && ok {
			n++
		}
	}
	severity, next := Fine, ""
	if n == 0 {
		severity, next = Blocked, admin+fmt.Sprintf(" labels nodes with what StorageClass %q allows, or corrects its allowedTopologies in a new one.", class.Name)
	}
	l.add(severity, "topology", next, "allowedTopologies of StorageClass %q are %s, which %d of %s have.", class.Name, text, n, count(len(f.nodes.value), "node"))
}

// selectorOf is the topologies of a class in the terms of the scheduler.
func selectorOf(terms []corev1.TopologySelectorTerm) *corev1.NodeSelector {
	s := &corev1.NodeSelector{}
	for _, t := range terms {
		var term corev1.NodeSelectorTerm
		for _, e := range t.MatchLabelExpressions {
			term.MatchExpressions = append(term.MatchExpressions, corev1.NodeSelectorRequirement{Key: e.Key, Operator: corev1.NodeSelectorOpIn, Values: e.Values})
		}
		s.NodeSelectorTerms = append(s.NodeSelectorTerms, term)
	}
	return s
}

func termsText(terms []corev1.TopologySelectorTerm) string {
	var alternatives []string
	for _, t := range terms {
		var all []string
		for _, e := range t.MatchLabelExpressions {
			all = append(all, e.Key+" in ("+strings.Join(e.Values, ", ")+")")
		}
		alternatives = append(alternatives, strings.Join(all, " and "))
	}
	return strings.Join(alternatives, ", or ")
}

// aboutSecrets is whether the secrets that are named are there.
func (f *facts) aboutSecrets() findings {
	var l findings
	purposes := map[string][]string{}
	facts := map[string]secretFact{}
	for _, s := range f.secrets {
		key := s.Namespace + "/" + s.Name
		purposes[key] = append(purposes[key], s.Purpose)
		facts[key] = s
	}
	for _, key := range slices.Sorted(maps.Keys(facts)) {
		s, what := facts[key], strings.Join(purposes[key], ", ")
		switch {
		case s.there.why != "":
			l.add(Unknown, "secret", "", "Whether Secret %s exists, which is named as %s, is %s.", key, what, s.there.why)
		case s.there.found:
			l.add(Fine, "secret", "", "Secret %s, which is named as %s, exists.", key, what)
		default:
			l.add(Blocked, "secret", admin+" creates Secret "+key+" with what the driver needs.", "Secret %s, which is named as %s, does not exist.", key, what)
		}
	}
	return l
}
