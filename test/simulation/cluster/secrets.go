// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"slices"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/snapshotter"
)

var secrets = corev1.SchemeGroupVersion.WithResource("secrets")

// secretName is the name of the Secret that all classes name.
const secretName = "credentials"

// Credentials are the values of the Secret.
var Credentials = map[string]string{"user": "x"}

// withSecret adds the Secret to the parameters of a class. The prefix names its purpose; "" is that of all purposes.
func (c *Cluster) withSecret(parameters map[string]string, prefix string) map[string]string {
	if c.features.Secrets {
		parameters["csi.storage.k8s.io/"+prefix+"secret-name"] = secretName
		parameters["csi.storage.k8s.io/"+prefix+"secret-namespace"] = Namespace
	}
	return parameters
}

// contentAnnotations returns the annotations of a content that the snapshot-controller creates.
func (c *Cluster) contentAnnotations() map[string]string {
	if !c.features.Secrets {
		return nil
	}
	return map[string]string{snapshotter.AnnSecretName: secretName, snapshotter.AnnSecretNamespace: Namespace}
}

// lacksSecret reports whether the classes name a Secret that does not exist.
func (c *Cluster) lacksSecret() bool {
	return c.features.Secrets && c.api.Get(secrets, Namespace, secretName) == nil
}

func (c *Cluster) createSecret() error {
	return c.api.Create(secrets, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: secretName}, StringData: Credentials,
	})
}

// disturbSecret returns the step of a user who deletes the Secret, or creates it again.
func (c *Cluster) disturbSecret(s state) []Step {
	switch {
	case c.lacksSecret():
		return []Step{{"user creates the Secret", func(context.Context) error { return c.createSecret() }}}
	case !c.features.Secrets, slices.ContainsFunc(s.contents, isUnrecorded):
		return nil // CreateSnapshot is repeated with the Secret
	}
	return []Step{{"user deletes the Secret", func(context.Context) error {
		c.SecretDeleted = true
		return c.api.Delete(secrets, Namespace, secretName, nil)
	}}}
}

// isUnrecorded reports whether the snapshot-controller has removed the record of a CreateSnapshot.
func isUnrecorded(o *snapshotv1.VolumeSnapshotContent) bool {
	return metav1.HasAnnotation(o.ObjectMeta, snapshotter.AnnBeingDeleted) && !metav1.HasAnnotation(o.ObjectMeta, snapshotter.AnnRequest)
}
