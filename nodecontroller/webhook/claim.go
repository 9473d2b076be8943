// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package webhook

import "context"

// rawClaim holds the fields of a claim that are read. Nil is absent or null.
type rawClaim struct {
	Metadata *rawMeta `json:"metadata"`
	Spec     struct {
		StorageClassName *string `json:"storageClassName"`
	} `json:"spec"`
}

// mutateClaim adds the finalizer to a claim of the driver. The default StorageClass is not resolved
// here: admission has set it before.
func (s *Server) mutateClaim(ctx context.Context, r *request) (verdict, error) {
	if s.cfg.ClaimFinalizer == "" {
		return verdict{reason: "Off"}, nil
	}
	claim := &rawClaim{}
	if err := decode(r.Object.Raw, claim); err != nil {
		return verdict{}, badRequest("decoding the claim: %w", err)
	}
	_, meta := metaOps(claim.Metadata)
	name := className(meta.Annotations, claim.Spec.StorageClassName)
	if name == nil {
		return verdict{reason: "Foreign"}, nil
	}
	class, err := s.newLookup(ctx, r.Namespace).class(*name)
	if err != nil || class == nil || class.Provisioner != s.cfg.Driver {
		return verdict{reason: "Foreign"}, err
	}
	ops := finalizerPatch(claim.Metadata, s.cfg.ClaimFinalizer)
	if len(ops) == 0 {
		return verdict{reason: "Protected"}, nil
	}
	return verdict{patch: ops, reason: "Unprotected"}, nil
}
