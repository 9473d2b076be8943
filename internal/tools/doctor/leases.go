// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/tools/apiread"
	"github.com/storage-controller/storage-controller/internal/tools/clock"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
)

// checkLeases checks the Lease of each role.
func (e *examination) checkLeases(ctx context.Context) {
	done := map[string]bool{}
	for _, r := range e.plan.Roles {
		if !done[r.Lease] {
			done[r.Lease] = true
			e.checkLease(ctx, r)
		}
	}
}

// checkLease checks that at most one process holds the Lease of a role, including its other names
// and the same name in other namespaces. Their holders would be active at the same time.
func (e *examination) checkLease(ctx context.Context, r Role) {
	name, namespace := "lease "+r.Lease, r.LeaseNamespace
	get := func(lease string) apiread.Result[*coordinationv1.Lease] {
		query := apiread.Query{Topic: name, What: apiread.Name("Lease", namespace, lease)}
		return apiread.Get(ctx, e.reader, query, lease, e.Kubernetes.CoordinationV1().Leases(namespace).Get)
	}
	lease := get(r.Lease)
	if !lease.Found && !lease.Missing {
		return
	}
	var held []string
	c := finding.Finding{Topic: name, Severity: finding.OK,
		Message: fmt.Sprintf("does not exist in namespace %s yet; the first leader creates it", namespace)}
	if lease.Found {
		c = e.holder(name, lease.Value)
	}
	for _, l := range append([]string{r.Lease}, r.Others...) {
		if known := get(l); known.Found && clock.IsHeld(known.Value, e.Clock.Now()) {
			held = append(held, describe(known.Value, e.Clock.Now()))
		}
	}
	elsewhere, unknown := e.heldElsewhere(ctx, r)
	held = append(held, elsewhere...)
	switch {
	case len(held) > 1:
		c.Severity = finding.Failing
		c.Message = fmt.Sprintf("%d holders: more than one controller is active: %s", len(held), strings.Join(held, "; "))
		c.Next = "stop all but one, or set the same --leader-election-namespace and --leader-election-id"
	case len(held) == 1 && !r.Elected && c.Severity == finding.OK:
		c.Severity, c.Message = finding.Warning, held[0]+", but a process with these settings ignores the Lease: --leader-election is off"
		c.Next = "set --leader-election, unless you are replacing that holder now"
	case len(held) == 1 && len(elsewhere) == 1:
		c.Severity, c.Message = finding.Warning, held[0]+", in another namespace: both would be active"
		c.Next = "set the same --leader-election-namespace, or stop the other one"
	case unknown != "" && c.Severity == finding.OK:
		c.Message += "; other namespaces were not checked. " + unknown
	}
	e.Findings = append(e.Findings, c)
}

// holder returns a check of the holder of a Lease.
func (e *examination) holder(name string, lease *coordinationv1.Lease) finding.Finding {
	c := finding.Finding{Topic: name, Severity: finding.OK, Message: describe(lease, e.Clock.Now())}
	if ptr.Deref(lease.Spec.HolderIdentity, "") == "" {
		c.Message = "no holder: the last one released it"
		return c
	}
	if !clock.IsHeld(lease, e.Clock.Now()) {
		c.Severity = finding.Warning
		c.Next = "the role is not active, unless leader election is off: check that a replica is running, and its log"
	}
	return c
}

// heldElsewhere returns the holders of Leases with the name of that of r in other namespaces, or why they are unknown. Roles may not
// list them, so that this is no finding of its own.
func (e *examination) heldElsewhere(ctx context.Context, r Role) (held []string, unknown string) {
	query := apiread.Query{
		What:   fmt.Sprintf("Leases named %q in all namespaces", r.Lease),
		Fields: fields.OneTermEqualSelector(metav1.ObjectNameField, r.Lease).String(),
	}
	reader := e.reader.With(func(f finding.Finding) { unknown = f.Message })
	leases := apiread.List[*coordinationv1.Lease](ctx, reader, query, e.Kubernetes.CoordinationV1().Leases(metav1.NamespaceAll).List)
	for _, l := range leases.Value {
		if l.Namespace != r.LeaseNamespace && clock.IsHeld(l, e.Clock.Now()) {
			held = append(held, describe(l, e.Clock.Now()))
		}
	}
	return held, unknown
}

// describe returns the name of lease, its holder, and the age of its last renewal.
func describe(lease *coordinationv1.Lease, now time.Time) string {
	s := lease.Spec
	text := fmt.Sprintf("%s/%s held by %s", lease.Namespace, lease.Name, ptr.Deref(s.HolderIdentity, ""))
	if s.RenewTime == nil {
		return text
	}
	age := duration.HumanDuration(max(0, now.Sub(s.RenewTime.Time)))
	if clock.IsHeld(lease, now) {
		return fmt.Sprintf("%s, renewed %s ago", text, age)
	}
	return fmt.Sprintf("%s, expired: renewed %s ago for %ds", text, age, ptr.Deref(s.LeaseDurationSeconds, 0))
}
