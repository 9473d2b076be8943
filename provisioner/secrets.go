package provisioner

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// parameterPrefix begins the class parameters that are for this program and not
// for the driver.
const parameterPrefix = "csi.storage.k8s.io/"

// secretKind is one purpose of a secret, with the class parameters that name it.
type secretKind struct {
	name, namespace                     string // after parameterPrefix
	deprecatedName, deprecatedNamespace string // whole; "" where there is none
}

var (
	secretDefault           = secretKind{"secret-name", "secret-namespace", "", ""}
	secretProvisioner       = secretKind{"provisioner-secret-name", "provisioner-secret-namespace", "csiProvisionerSecretName", "csiProvisionerSecretNamespace"}
	secretControllerPublish = secretKind{"controller-publish-secret-name", "controller-publish-secret-namespace", "csiControllerPublishSecretName", "csiControllerPublishSecretNamespace"}
	secretNodeStage         = secretKind{"node-stage-secret-name", "node-stage-secret-namespace", "csiNodeStageSecretName", "csiNodeStageSecretNamespace"}
	secretNodePublish       = secretKind{"node-publish-secret-name", "node-publish-secret-namespace", "csiNodePublishSecretName", "csiNodePublishSecretNamespace"}
	secretControllerExpand  = secretKind{"controller-expand-secret-name", "controller-expand-secret-namespace", "", ""}
	secretNodeExpand        = secretKind{"node-expand-secret-name", "node-expand-secret-namespace", "", ""}
	secretControllerModify  = secretKind{"controller-modify-secret-name", "controller-modify-secret-namespace", "", ""}
)

// secretRefs is the secrets of a volume; nil where there is none.
type secretRefs struct {
	Provisioner       *corev1.SecretReference
	ControllerPublish *corev1.SecretReference
	NodeStage         *corev1.SecretReference
	NodePublish       *corev1.SecretReference
	ControllerExpand  *corev1.SecretReference
	NodeExpand        *corev1.SecretReference
	ControllerModify  *corev1.SecretReference
}

// secretScope is what the templates of secret names may refer to.
type secretScope struct {
	volume           string
	claim, namespace string
	annotations      map[string]string // of the claim
}

// secretsOf is all secrets that the parameters of a class name. Everything that
// is wrong is reported, not only the first.
func secretsOf(parameters map[string]string, scope secretScope) (secretRefs, error) {
	var refs secretRefs
	var errs []error
	for _, item := range []struct {
		kind secretKind
		ref  **corev1.SecretReference
	}{
		{secretProvisioner, &refs.Provisioner}, {secretControllerPublish, &refs.ControllerPublish},
		{secretNodeStage, &refs.NodeStage}, {secretNodePublish, &refs.NodePublish},
		{secretControllerExpand, &refs.ControllerExpand}, {secretNodeExpand, &refs.NodeExpand},
		{secretControllerModify, &refs.ControllerModify},
	} {
		ref, err := secretOf(item.kind, parameters, scope)
		if err != nil {
			errs = append(errs, err)
		}
		*item.ref = ref
	}
	return refs, errors.Join(errs...)
}

// allowed refuses secrets outside of namespaces; no namespaces mean all.
func (r secretRefs) allowed(namespaces []string) error {
	for _, ref := range []*corev1.SecretReference{r.Provisioner, r.ControllerPublish, r.NodeStage, r.NodePublish, r.ControllerExpand, r.NodeExpand, r.ControllerModify} {
		if ref != nil && len(namespaces) > 0 && !slices.Contains(namespaces, ref.Namespace) {
			return fmt.Errorf("secret \"%s/%s\": --secret-namespaces admits none of that namespace", ref.Namespace, ref.Name)
		}
	}
	return nil
}

// secretOf is the secret of one kind, or the default of the class; nil for none.
func secretOf(kind secretKind, parameters map[string]string, scope secretScope) (*corev1.SecretReference, error) {
	for _, k := range []secretKind{kind, secretDefault} {
		name, namespace, err := k.templates(parameters)
		if err != nil {
			return nil, err
		}
		if name == nil {
			continue
		}
		tokens := map[string]string{"pv.name": scope.volume, "pvc.namespace": scope.namespace}
		ref := &corev1.SecretReference{}
		if ref.Namespace, err = expand(k.namespace, *namespace, tokens); err != nil {
			return nil, err
		}
		if problems := validation.IsDNS1123Label(ref.Namespace); len(problems) > 0 {
			return nil, fmt.Errorf("class parameter %s%s: %q resolves to %q, which is no name of a namespace: %v", parameterPrefix, k.namespace, *namespace, ref.Namespace, problems)
		}
		tokens["pvc.name"] = scope.claim
		for key, value := range scope.annotations {
			tokens["pvc.annotations['"+key+"']"] = value
		}
		if ref.Name, err = expand(k.name, *name, tokens); err != nil {
			return nil, err
		}
		if problems := validation.IsDNS1123Subdomain(ref.Name); len(problems) > 0 {
			return nil, fmt.Errorf("class parameter %s%s: %q resolves to %q, which is no name of a secret: %v", parameterPrefix, k.name, *name, ref.Name, problems)
		}
		return ref, nil
	}
	return nil, nil
}

// templates is the two parameters of a kind; both nil when neither is set.
func (k secretKind) templates(parameters map[string]string) (name, namespace *string, err error) {
	get := func(key, deprecated string) (*string, error) {
		value, ok := parameters[parameterPrefix+key]
		old, oldOK := parameters[deprecated]
		switch {
		case ok && oldOK:
			return nil, fmt.Errorf("class parameters %s%s and %s: only one of them may be set", parameterPrefix, key, deprecated)
		case oldOK:
			value, ok = old, true
		}
		if !ok {
			return nil, nil
		}
		if value == "" {
			return nil, fmt.Errorf("class parameter %s%s: must not be empty", parameterPrefix, key)
		}
		return &value, nil
	}
	if name, err = get(k.name, k.deprecatedName); err != nil {
		return nil, nil, err
	}
	if namespace, err = get(k.namespace, k.deprecatedNamespace); err != nil {
		return nil, nil, err
	}
	if (name == nil) != (namespace == nil) {
		return nil, nil, fmt.Errorf("class parameters %s%s and %s%s: both or none must be set", parameterPrefix, k.name, parameterPrefix, k.namespace)
	}
	return name, namespace, nil
}

// expand replaces the tokens of a template.
func expand(parameter, template string, tokens map[string]string) (string, error) {
	unknown := map[string]bool{}
	result := os.Expand(template, func(token string) string {
		value, ok := tokens[token]
		if !ok {
			unknown[token] = true
		}
		return value
	})
	if len(unknown) > 0 {
		return "", fmt.Errorf("class parameter %s%s: %q has tokens that are not known here: %q", parameterPrefix, parameter, template, slices.Sorted(maps.Keys(unknown)))
	}
	return result, nil
}

// reservedParameters are all that may follow parameterPrefix.
var reservedParameters = func() map[string]bool {
	known := map[string]bool{"fstype": true}
	for _, k := range []secretKind{
		secretDefault, secretProvisioner, secretControllerPublish, secretNodeStage, secretNodePublish,
		secretControllerExpand, secretNodeExpand, secretControllerModify,
	} {
		known[k.name], known[k.namespace] = true, true
	}
	return known
}()
