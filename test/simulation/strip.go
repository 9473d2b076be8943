// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// stripping is a mutating webhook that removes the records of CreateVolume from the claims that are written while it is installed,
// by any client.
type stripping struct {
	installed atomic.Bool
	until     int      // the step at which it is removed
	stripped  sync.Map // UIDs of claims
	count     atomic.Int64
}

// strip installs the webhook for a while.
func (s *simulation) strip() {
	s.record("a webhook removes the records of claims for a while")
	s.stripping.until = s.step + 10 + s.choices.Pick(80)
	s.stripping.installed.Store(true)
}

// stripNoMore removes the webhook when its time is over.
func (s *simulation) stripNoMore(step int) {
	if s.stripping.installed.Load() && step >= s.stripping.until {
		s.stripping.installed.Store(false)
		s.record("the webhook is removed")
		if s.stripping.count.Load() > 0 {
			s.happens("a webhook removes a record")
		}
	}
}

// mutate is the webhook. The lock of the API server is held.
func (s *simulation) mutate(_ apiserver.Request, obj runtime.Object) {
	claim, ok := obj.(*corev1.PersistentVolumeClaim)
	if !ok || !s.stripping.installed.Load() || claim.Annotations[cluster.ProvisioningRequest] == "" {
		return
	}
	delete(claim.Annotations, cluster.ProvisioningRequest)
	s.stripping.stripped.Store(claim.UID, true)
	s.stripping.count.Add(1)
}

// lacksRecord reports whether the record of the volume of claim was removed, so that the next leader does not know of its request.
func (s *simulation) lacksRecord(claim *corev1.PersistentVolumeClaim) bool {
	if claim == nil || claim.Annotations[cluster.ProvisioningRequest] != "" {
		return false
	}
	_, stripped := s.stripping.stripped.Load(claim.UID)
	return stripped && slices.Contains(claim.Finalizers, cluster.ProvisioningFinalizer)
}

// releasesOfUnrecorded returns the steps of administrators who remove the finalizer of claims whose record was removed, once they
// have verified that the volume does not exist.
func (s *simulation) releasesOfUnrecorded() []cluster.Step {
	var steps []cluster.Step
	for _, claim := range cluster.List[*corev1.PersistentVolumeClaim](s.api, cluster.Claims) {
		if !s.lacksRecord(claim) || s.has("pvc-"+string(claim.UID)) {
			continue
		}
		next := claim.DeepCopy()
		next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == cluster.ProvisioningFinalizer })
		steps = append(steps, cluster.Step{
			Name: "administrator releases claim " + claim.Name + ", whose volume does not exist",
			Do:   func(context.Context) error { return s.api.Update(cluster.Claims, next, "") },
		})
	}
	return steps
}
