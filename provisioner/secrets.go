// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package provisioner

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// needsSecret reports whether the secret of the request is to be read: before the first call, and again before each repetition.
func (s claimState) needsSecret() bool {
	o := s.call.Payload
	return o.plan.Secrets.Provisioner != nil && (o.request.Secrets == nil || s.call.State != intent.Planned && !s.freshSecrets)
}

// readSecrets reads the secret of a request, whose values are kept no longer than the operation. Before CreateVolume is repeated the
// secret is read again, because a wrong one may be why the driver does not answer. If that fails, the last values are used.
func (l *claimLoop) readSecrets(ctx context.Context, c call, r *reads) (change, error) {
	o := c.Payload
	values, err := kube.ReadSecret(ctx, l.c.deps.Client, o.plan.Secrets.Provisioner)
	switch {
	case err == nil:
		r.freshSecrets = true
		return secretsRead(o.request, values), nil
	case o.request.Secrets != nil:
		r.freshSecrets = true
		klog.FromContext(ctx).Error(err, "Reading the secret again failed, retrying with the previous values",
			"secret", klog.KRef(o.plan.Secrets.Provisioner.Namespace, o.plan.Secrets.Provisioner.Name), "stage", stageOf(c))
		return change{}, nil
	case c.State != intent.Planned && kube.IsNotFound(err):
		err = cannotRetry(o.plan.VolumeName, err, "Recreate the secret")
	}
	l.c.claimFailed(o.claim, failedEvent(o.plan.ClassName, err))
	if c.State == intent.Planned { // the request is prepared again once the secret or the class is fixed
		return noVolume(nil), err
	}
	return change{}, err
}

func secretName(ref corev1.SecretReference) string {
	if ref.Name == "" {
		return "none"
	}
	return fmt.Sprintf("%q", ref.Namespace+"/"+ref.Name)
}
