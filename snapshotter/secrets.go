// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/storage-controller/storage-controller/internal/volumerules"
)

// annotatedSecret returns the secret that the snapshot-controller has named in the annotations of c,
// for the calls that create and delete. Nil means none.
func (d driver) annotatedSecret(c *content) (*corev1.SecretReference, error) {
	name, hasName := c.Annotations[c.secretName]
	namespace, hasNamespace := c.Annotations[c.secretNamespace]
	switch {
	case !hasName || !hasNamespace:
		return nil, nil
	case name == "" || namespace == "":
		return nil, fmt.Errorf("cannot retrieve secrets for %s content %q, err: secret name or namespace not specified",
			c.noun, c.Name)
	}
	return d.permitted(&corev1.SecretReference{Namespace: namespace, Name: name})
}

// deletionSecret returns the Secret of a deletion, nil for none, or the step that reports why it cannot be used: a driver without
// credentials may return OK for a snapshot that it cannot see.
func (d driver) deletionSecret(s state) (secret *corev1.SecretReference, problem *step) {
	c := s.content
	secret, err := d.annotatedSecret(c)
	report := step{action: doReportDeletion, reason: "CannotDelete", err: credentials(c, err)}
	switch {
	case err != nil:
		return nil, &report
	case secret == nil || s.noSecret == nil:
		return secret, nil
	}
	report.err = credentials(c, fmt.Errorf("%w. Create the Secret, or remove the annotations %s and %s to delete without credentials",
		s.noSecret, c.secretName, c.secretNamespace))
	report.cause = cause{blockedSecret, fmt.Sprintf("Secret %s/%s", secret.Namespace, secret.Name)}
	return nil, &report
}

// checkSecret returns the secret for a check of c: of a pre-provisioned snapshot or group with a class, that of the parameters of the
// class, else that of the annotations. Nil means none.
func (d driver) checkSecret(c *content, class *class) (*corev1.SecretReference, error) {
	switch {
	case c.dynamic() || c.class == "":
		return d.annotatedSecret(c)
	case class == nil:
		return nil, fmt.Errorf("failed to get %s class %s for %s content %s: %s %q not found",
			c.noun, c.class, c.noun, c.Name, c.kind.class, c.class)
	}
	prefix := volumerules.ParameterPrefix + c.kind.readSecret
	keyName, keyNamespace := prefix+"name", prefix+"namespace"
	name, hasName := class.parameters[keyName]
	namespace, hasNamespace := class.parameters[keyNamespace]
	switch {
	case !hasName && !hasNamespace:
		return nil, nil
	case name == "" || namespace == "":
		return nil, fmt.Errorf("class parameters %q and %q: set both or none", keyName, keyNamespace)
	}
	tokens := map[string]string{c.parameter + "content.name": c.Name, c.parameter + ".namespace": c.ref.Namespace}
	ref := &corev1.SecretReference{}
	var err error
	ref.Namespace, err = volumerules.ExpandTemplate(keyNamespace, namespace, tokens, validation.IsDNS1123Label)
	if err != nil {
		return nil, err
	}
	tokens[c.parameter+".name"] = c.ref.Name
	ref.Name, err = volumerules.ExpandTemplate(keyName, name, tokens, validation.IsDNS1123Subdomain)
	if err != nil {
		return nil, err
	}
	return d.permitted(ref)
}

// permitted returns ref, or an error if --secret-namespaces excludes it.
func (d driver) permitted(ref *corev1.SecretReference) (*corev1.SecretReference, error) {
	return ref, volumerules.Secrets{Provisioner: ref}.Permitted(d.SecretNamespaces)
}
