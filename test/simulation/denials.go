// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"errors"
	"maps"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/storage-controller/storage-controller/test/simulation/apiserver"
	"github.com/storage-controller/storage-controller/test/simulation/cluster"
)

// denial is a permission that all processes lack for a while, or a webhook that refuses their writes.
type denial struct {
	kind  int // index of denialErrors
	until int // the step at which it ends
}

// denialErrors are the responses: of the API server without the permission, and of webhooks.
var denialErrors = []func(r apiserver.Request) error{
	func(r apiserver.Request) error {
		return apierrors.NewForbidden(r.Resource.GroupResource(), r.Name, errors.New("simulated"))
	},
	func(apiserver.Request) error {
		return apierrors.NewBadRequest(`admission webhook "simulated" denied the request: simulated`)
	},
	func(r apiserver.Request) error {
		return apierrors.NewInvalid(schema.GroupKind{Group: r.Resource.Group, Kind: r.Resource.Resource}, r.Name, nil)
	},
	func(apiserver.Request) error { return &apierrors.StatusError{ErrStatus: webhookTimedOut} },
}

// webhookTimedOut is the response if a webhook with the failurePolicy Fail does not respond.
var webhookTimedOut = metav1.Status{
	Status: metav1.StatusFailure, Code: 500, Reason: metav1.StatusReasonInternalError,
	Message: `Internal error occurred: failed calling webhook "simulated": context deadline exceeded`,
}

// deniable returns the verbs and resources of the requests of the processes, without those that fill caches.
func (s *simulation) deniable() []string {
	f := s.scale.features
	all := []string{
		"get persistentvolumeclaims", "patch persistentvolumeclaims", "create persistentvolumes", "get persistentvolumes",
		"patch persistentvolumes", "delete persistentvolumes",
	}
	add := func(used bool, more ...string) {
		if used {
			all = append(all, more...)
		}
	}
	add(!f.Topolvm, "get volumeattachments", "patch volumeattachments", "patch volumeattachments/status")
	add(f.Topolvm, "create "+cluster.LogicalVolumes.Resource, "patch "+cluster.LogicalVolumes.Resource,
		"delete "+cluster.LogicalVolumes.Resource, "get "+cluster.LogicalVolumes.Resource)
	add(f.Resize, "patch persistentvolumeclaims/status", "get volumeattributesclasses")
	add(f.Snapshots, "get volumesnapshotcontents", "patch volumesnapshotcontents", "patch volumesnapshotcontents/status")
	add(f.Copies && f.Snapshots, "get volumesnapshots", "patch volumesnapshots")
	add(f.Secrets, "get secrets")
	add(f.Nodes, "get nodes", "get csinodes", "list pods", "get storageclasses", "delete persistentvolumeclaims", "patch nodes",
		"update configmaps", "create configmaps")
	add(f.Capacity, "create csistoragecapacities", "update csistoragecapacities", "delete csistoragecapacities")
	return all
}

// deny has the API server refuse some requests for a while.
func (s *simulation) deny() {
	all := s.deniable()
	what, d := all[s.choices.Pick(len(all))], denial{until: s.step + 10 + s.choices.Pick(80)}
	how := "it lacks the permission"
	if read := strings.HasPrefix(what, "get ") || strings.HasPrefix(what, "list "); !read {
		d.kind = s.choices.Pick(len(denialErrors))
	}
	if d.kind > 0 {
		how = "a webhook refuses it"
	}
	s.record("no process can %s for a while: %s", what, how)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.denials[what] = d
	s.secretsDenied = s.secretsDenied || what == "get secrets"
}

// permitAgain ends the denials whose time is over.
func (s *simulation) permitAgain(step int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, what := range slices.Sorted(maps.Keys(s.denials)) {
		if step >= s.denials[what].until {
			delete(s.denials, what)
			s.record("the processes can %s again", what)
		}
	}
}

// denied returns the error of a request that is refused, else nil.
func (s *simulation) denied(r apiserver.Request) error {
	what := r.Verb + " " + r.Resource.Resource
	if r.Subresource != "" {
		what += "/" + r.Subresource
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d, ok := s.denials[what]
	if !ok {
		return nil
	}
	s.checker.refusals.Add(1)
	s.happensLocked("a request is refused")
	return denialErrors[d.kind](r)
}
