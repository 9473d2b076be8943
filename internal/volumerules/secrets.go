// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package volumerules

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// ParameterPrefix begins the StorageClass parameters that are for the sidecars and not for the driver.
const ParameterPrefix = "csi.storage.k8s.io/"

// Annotations of a PersistentVolume that name secrets.
const (
	// AnnDeletionSecretName is the name of the Secret for DeleteVolume, on a PV.
	AnnDeletionSecretName = "volume.kubernetes.io/provisioner-deletion-secret-name"
	// AnnDeletionSecretNamespace is the namespace of this Secret.
	AnnDeletionSecretNamespace = "volume.kubernetes.io/provisioner-deletion-secret-namespace"
	// AnnModifySecretName is the name of the Secret for ControllerModifyVolume, on a PV.
	AnnModifySecretName = "volume.kubernetes.io/controller-modify-secret-name"
	// AnnModifySecretNamespace is the namespace of this Secret.
	AnnModifySecretNamespace = "volume.kubernetes.io/controller-modify-secret-namespace"
)

// Purpose is the use of a secret, as the StorageClass parameters spell it: NAME-secret-name and
// NAME-secret-namespace.
type Purpose string

// The purposes of secrets. Kubelets use NodeStage, NodePublish and NodeExpand, this program the others.
const (
	Provisioner       Purpose = "provisioner"
	ControllerPublish Purpose = "controller-publish"
	NodeStage         Purpose = "node-stage"
	NodePublish       Purpose = "node-publish"
	ControllerExpand  Purpose = "controller-expand"
	NodeExpand        Purpose = "node-expand"
	ControllerModify  Purpose = "controller-modify"
)

// purposes lists every purpose once: its field of [Secrets], and the beginning of its deprecated
// parameters, if it has any.
var purposes = []struct {
	purpose    Purpose
	deprecated string
	field      func(*Secrets) **corev1.SecretReference
}{
	{Provisioner, "csiProvisioner", func(s *Secrets) **corev1.SecretReference { return &s.Provisioner }},
	{ControllerPublish, "csiControllerPublish", func(s *Secrets) **corev1.SecretReference { return &s.ControllerPublish }},
	{NodeStage, "csiNodeStage", func(s *Secrets) **corev1.SecretReference { return &s.NodeStage }},
	{NodePublish, "csiNodePublish", func(s *Secrets) **corev1.SecretReference { return &s.NodePublish }},
	{ControllerExpand, "", func(s *Secrets) **corev1.SecretReference { return &s.ControllerExpand }},
	{NodeExpand, "", func(s *Secrets) **corev1.SecretReference { return &s.NodeExpand }},
	{ControllerModify, "", func(s *Secrets) **corev1.SecretReference { return &s.ControllerModify }},
}

// NameParameter returns the StorageClass parameter for the name of the secret, without the prefix.
func (p Purpose) NameParameter() string { return p.parameter("name") }

func (p Purpose) parameter(suffix string) string {
	if p == "" { // the default for every purpose
		return "secret-" + suffix
	}
	return string(p) + "-secret-" + suffix
}

// Secrets holds the secrets of a volume; nil means none.
type Secrets struct {
	Provisioner       *corev1.SecretReference
	ControllerPublish *corev1.SecretReference
	NodeStage         *corev1.SecretReference
	NodePublish       *corev1.SecretReference
	ControllerExpand  *corev1.SecretReference
	NodeExpand        *corev1.SecretReference
	ControllerModify  *corev1.SecretReference
}

// Secret is one secret of a StorageClass or a volume. In a StorageClass, namespace and name may
// be templates.
type Secret struct {
	Purpose         Purpose
	Namespace, Name string
}

// List returns the secrets in the order of the purposes.
func (s Secrets) List() []Secret {
	var list []Secret
	for _, p := range purposes {
		if ref := *p.field(&s); ref != nil {
			list = append(list, Secret{p.purpose, ref.Namespace, ref.Name})
		}
	}
	return list
}

// Permitted returns an error if a secret is in none of namespaces. Without namespaces it permits all.
func (s Secrets) Permitted(namespaces []string) error {
	for _, secret := range s.List() {
		if err := kube.PermitSecret(namespaces, secret.Namespace, secret.Name); err != nil {
			return err
		}
	}
	return nil
}

// SecretScope holds the values of the tokens in secret templates.
type SecretScope struct {
	Volume           string // name of the PersistentVolume
	Claim, Namespace string
	Annotations      map[string]string // of the claim
}

// ResolveSecrets returns the secrets that the parameters of a StorageClass name for one volume. The
// error has every invalid parameter.
func ResolveSecrets(parameters map[string]string, scope SecretScope) (Secrets, error) {
	var secrets Secrets
	var errs []error
	for _, p := range purposes {
		ref, err := ResolveSecret(p.purpose, parameters, scope)
		errs = append(errs, err)
		*p.field(&secrets) = ref
	}
	return secrets, errors.Join(errs...)
}

// ResolveSecret returns the secret for one purpose, or the default of the class. It returns nil if
// the class has neither.
func ResolveSecret(purpose Purpose, parameters map[string]string, scope SecretScope) (*corev1.SecretReference, error) {
	from, template, err := secretTemplate(purpose, parameters)
	if err != nil || template == nil {
		return nil, err
	}
	tokens := map[string]string{"pv.name": scope.Volume, "pvc.namespace": scope.Namespace}
	ref := &corev1.SecretReference{}
	ref.Namespace, err = ExpandTemplate(ParameterPrefix+from.parameter("namespace"), template.Namespace, tokens, validation.IsDNS1123Label)
	if err != nil {
		return nil, err
	}
	tokens["pvc.name"] = scope.Claim
	for key, value := range scope.Annotations {
		tokens["pvc.annotations['"+key+"']"] = value
	}
	ref.Name, err = ExpandTemplate(ParameterPrefix+from.parameter("name"), template.Name, tokens, validation.IsDNS1123Subdomain)
	if err != nil {
		return nil, err
	}
	return ref, nil
}

// SecretTemplates returns the secrets that the parameters of a StorageClass name, unresolved. The
// error has every parameter that is invalid for all volumes.
func SecretTemplates(parameters map[string]string) ([]Secret, error) {
	var secrets []Secret
	var errs []error
	for _, p := range purposes {
		_, template, err := secretTemplate(p.purpose, parameters)
		errs = append(errs, err)
		if template != nil {
			secrets = append(secrets, Secret{p.purpose, template.Namespace, template.Name})
		}
	}
	return secrets, errors.Join(errs...)
}

// SecretsOfVolume returns the secrets that an existing PersistentVolume references.
func SecretsOfVolume(pv *corev1.PersistentVolume) Secrets {
	var secrets Secrets
	if name := pv.Annotations[AnnDeletionSecretName]; name != "" {
		secrets.Provisioner = &corev1.SecretReference{Namespace: pv.Annotations[AnnDeletionSecretNamespace], Name: name}
	}
	if csi := pv.Spec.CSI; csi != nil {
		secrets.ControllerPublish, secrets.NodeStage = csi.ControllerPublishSecretRef, csi.NodeStageSecretRef
		secrets.NodePublish = csi.NodePublishSecretRef
		secrets.ControllerExpand, secrets.NodeExpand = csi.ControllerExpandSecretRef, csi.NodeExpandSecretRef
	}
	return secrets
}

// secretTemplate returns the two parameters for a purpose, or those of the default, which is from
// the purpose "". It returns nil if neither is set.
func secretTemplate(purpose Purpose, parameters map[string]string) (from Purpose, template *corev1.SecretReference, err error) {
	for _, p := range []Purpose{purpose, ""} {
		name, err := p.value(parameters, "name", "Name")
		if err != nil {
			return p, nil, err
		}
		namespace, err := p.value(parameters, "namespace", "Namespace")
		switch {
		case err != nil:
			return p, nil, err
		case (name == "") != (namespace == ""):
			return p, nil, fmt.Errorf("class parameters %q and %q: set both or none",
				ParameterPrefix+p.parameter("name"), ParameterPrefix+p.parameter("namespace"))
		case name != "":
			return p, &corev1.SecretReference{Namespace: namespace, Name: name}, nil
		}
	}
	return "", nil, nil
}

// value returns one parameter of a purpose, or "" if it is not set.
func (p Purpose) value(parameters map[string]string, suffix, deprecatedSuffix string) (string, error) {
	key := ParameterPrefix + p.parameter(suffix)
	value, set := parameters[key]
	for _, known := range purposes {
		if known.purpose != p || known.deprecated == "" {
			continue
		}
		deprecated := known.deprecated + "Secret" + deprecatedSuffix
		old, oldSet := parameters[deprecated]
		if set && oldSet {
			return "", fmt.Errorf("class parameters %q and %q: set only one of them", key, deprecated)
		}
		if oldSet {
			value, set = old, true
		}
	}
	if set && value == "" {
		return "", fmt.Errorf("class parameter %q: must not be empty", key)
	}
	return value, nil
}

// ExpandTemplate replaces the tokens in the template of a secret's namespace or name, which is the value of a class parameter, and
// validates the result.
func ExpandTemplate(parameter, template string, tokens map[string]string, validate func(string) []string) (string, error) {
	unknown := map[string]bool{}
	result := os.Expand(template, func(token string) string {
		value, ok := tokens[token]
		if !ok {
			unknown[token] = true
		}
		return value
	})
	if len(unknown) > 0 {
		return "", fmt.Errorf("class parameter %q: template %q has unknown tokens %q", parameter, template,
			slices.Sorted(maps.Keys(unknown)))
	}
	if problems := validate(result); len(problems) > 0 {
		return "", fmt.Errorf("class parameter %q: template %q resolves to the invalid name %q: %v", parameter, template, result, problems)
	}
	return result, nil
}

// Correction returns the known StorageClass parameter that differs from key in case or punctuation only, or "". Both are without
// [ParameterPrefix].
func Correction(key string) string {
	letters := func(r rune) rune {
		if r < 'a' || r > 'z' {
			return -1
		}
		return r
	}
	for known := range knownParameters {
		if strings.Map(letters, known) == strings.Map(letters, strings.ToLower(key)) {
			return known
		}
	}
	return ""
}

// IsParameter reports whether a StorageClass parameter is known, given without [ParameterPrefix].
func IsParameter(key string) bool { return knownParameters[key] }

var knownParameters = func() map[string]bool {
	known := map[string]bool{"fstype": true, "secret-name": true, "secret-namespace": true}
	for _, p := range purposes {
		known[p.purpose.parameter("name")], known[p.purpose.parameter("namespace")] = true, true
	}
	return known
}()
