// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/doctor"
)

const (
	// permissionsTTL is how long the result of a review is the answer to all clients.
	permissionsTTL = time.Minute
	// permissionsTimeout bounds a review.
	permissionsTimeout = time.Minute
)

// permissions reviews the permissions of the process for all clients of /statusz together: one review at a time, and one a minute.
type permissions struct {
	review func(doctor.Plan) (doctor.Permissions, error)
	turn   chan struct{} // has an element while a client reads or writes last
	last   *reviewed     // nil: none yet
}

// reviewed is a plan with the permissions that were reviewed for it.
type reviewed struct {
	at          time.Time // the end of the review
	plan        doctor.Plan
	permissions doctor.Permissions
}

// newPermissions returns permissions that sends its reviews with the credentials of the process, until ctx ends. Every user may
// review itself.
func newPermissions(ctx context.Context, c Config) *permissions {
	review := func(plan doctor.Plan) (doctor.Permissions, error) {
		config, err := restConfig(c)
		if err != nil {
			return doctor.Permissions{}, err
		}
		client, err := kubernetes.NewForConfig(kube.ForRole(config, c.Version, "permissions", reviewQPS, 1))
		if err != nil {
			return doctor.Permissions{}, err
		}
		ctx, cancel := context.WithTimeout(ctx, permissionsTimeout)
		defer cancel()
		return doctor.Review(ctx, client, plan), nil
	}
	return &permissions{review: review, turn: make(chan struct{}, 1)}
}

// get returns the permissions that plan needs, or those of an earlier plan less than a minute ago. The review does not end with
// ctx, so that the next client gets its result.
func (p *permissions) get(ctx context.Context, plan func() doctor.Plan) (*reviewed, error) {
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if p.last != nil && time.Since(p.last.at) < permissionsTTL {
		return p.last, nil
	}
	next := &reviewed{plan: plan()}
	var err error
	next.permissions, err = p.review(next.plan)
	if err != nil {
		return nil, err
	}
	next.at = time.Now()
	p.last = next
	return next, nil
}
