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
	request, read, err := d.repeatedRequest(s)
	secret, problem := d.deletionSecret(s)
	switch {
	case read != nil:
		return *read
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

// decideCheckReplay handles a content whose snapshot is deleted next while a check of it is indeterminate: executed after
// DeleteSnapshot, the check would create the snapshot again. It returns false if there is no such check.
func (d driver) decideCheckReplay(s state) (next step, repeats bool) {
	if !s.call.State.Unanswered() {
		return step{}, false
	}
	request, read, err := d.repeatedRequest(s)
	switch {
	case read != nil:
		return *read, true
	case err != nil: // this process has not called it
		return step{}, false
	}
	return s.decideRepetition(request, nil), true // the Secret is read
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

// repeatedRequest returns the request of a repetition, or the step that reads the class first, which the cache of a new leader may lack.
func (d driver) repeatedRequest(s state) (request *createRequest, read *step, err error) {
	request, err = d.createRequest(s.content, s.class, s.call)
	if err != nil && s.class == nil && s.content.class != "" && !s.classRead {
		return nil, &step{action: doReadClass, reason: "NotCached"}, nil
	}
	return request, nil, err
}
