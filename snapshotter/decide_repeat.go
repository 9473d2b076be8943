// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/storage-controller/storage-controller/internal/intent"
	"github.com/storage-controller/storage-controller/internal/kube"
)

// decideReplay handles a content that is being deleted while a CreateSnapshot is indeterminate. The
// call is repeated until its outcome is known, because only then the snapshot can be deleted.
func (d driver) decideReplay(s state) step {
	c := s.content
	suspected := c.suspected(s.call)
	if suspected && !s.live { // a previous leader may have recorded a call
		return step{action: doReadContent, reason: "Unconfirmed", report: doReportDeletion}
	}
	request, err := d.createRequest(c, s.class, s.call)
	secret, problem := d.deletionSecret(s)
	switch {
	case err != nil && s.isClassUncached():
		return readClassStep()
	case suspected && (err != nil || problem != nil): // it was probably never called
		return s.decideRelease()
	case err != nil:
		err = fmt.Errorf("%s is indeterminate and cannot be repeated: %w", c.create, err)
		return step{action: doReportDeletion, reason: "CannotRepeat", err: deletionError(c, err),
			cause: cause{blockedOutcome, fmt.Sprintf("a valid %s: %v", c.classKind, err)}}
	case problem != nil:
		return *problem
	}
	return s.decideRepetition(request, secret)
}

// decideRepetition repeats a CreateSnapshot during a deletion. The request is recorded again, although an earlier leader may have
// recorded it: a write of that leader that takes effect late would remove the finalizer during the repetition. It fails if the record
// is another one.
func (s state) decideRepetition(request *createRequest, secret *corev1.SecretReference) step {
	c := s.content
	change := kube.MetadataPatch{SetAnnotations: map[string]string{AnnRequest: request.encode(s.term)}, Tests: recordTest(c)}
	if !c.forced(s.call) {
		change.InitAnnotations = map[string]string{c.creating: "yes"}
		if value, ok := c.Annotations[c.creating]; ok { // a user who removes it ends the wait
			change.Tests[kube.AnnotationPath(c.creating)] = value
		}
	}
	return s.decideCall(step{reason: "Indeterminate", request: request, change: change, secret: secret, report: doReportDeletion},
		intent.BeforeCall)
}

// isClassUncached reports whether the class may exist although the cache of a new leader lacks it.
func (s state) isClassUncached() bool { return s.class == nil && s.content.class != "" && !s.classRead }

func readClassStep() step {
	return step{action: doReadClass, reason: "NotCached"}
}
