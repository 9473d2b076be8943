// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"strings"

	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// checkRoles checks whether the roles could start with the objects that the API server has. It uses the
// permissions of this process, so that it is left out for another user.
func (e *examination) checkRoles(ctx context.Context) {
	for _, r := range e.plan.Roles {
		if r.Probe == nil || e.in.Impersonate != "" {
			continue
		}
		err := r.Probe(ctx, e.in.Config)
		if err == nil {
			e.ok("role "+r.Name, "can start")
			continue
		}
		reason := strings.ReplaceAll(err.Error(), "\n", "; ")
		if r.Named {
			e.add("role "+r.Name, finding.Failing, "fix the error; until then the process exits at its start", "%s", reason)
			continue
		}
		e.Findings = append(e.Findings, DisabledRole(r.Name, "disabled: "+reason))
	}
}

// DisabledRole returns the finding about a role that could not start.
func DisabledRole(role, message string) finding.Finding {
	return finding.New(finding.Warning, "role "+role, message,
		"fix the error; until then the role is disabled, and started again with back-off")
}
