package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/utils/ptr"
)

// checkLeases looks at the Lease of each role, at those under other names, and for the
// same ones in other namespaces: whoever holds one of these works at the same time.
func (e *examination) checkLeases(ctx context.Context) {
	if e.driver.Name == "" {
		e.skip("leases", "the name of the driver, from which theirs follow, is not known")
		return
	}
	done := map[string]bool{}
	for _, r := range e.plan.Roles {
		if done[r.Lease] {
			continue
		}
		done[r.Lease] = true
		e.checkLease(ctx, r)
	}
}

func (e *examination) checkLease(ctx context.Context, r Role) {
	name, namespace := "lease "+r.Lease, e.plan.LeaseNamespace
	lease, err := e.client.CoordinationV1().Leases(namespace).Get(ctx, r.Lease, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		e.skip(name, "%v", err)
		return
	}
	var held []string
	c := Check{Name: name, Status: OK, Message: fmt.Sprintf("not in namespace %s yet; the first that leads makes it", namespace)}
	if err == nil {
		c = e.judge(name, lease)
		if alive(lease, e.now()) {
			held = append(held, describe(lease, e.now()))
		}
	}
	for _, other := range r.Others {
		l, err := e.client.CoordinationV1().Leases(namespace).Get(ctx, other, metav1.GetOptions{})
		if err == nil && alive(l, e.now()) {
			held = append(held, describe(l, e.now()))
		}
	}
	elsewhere, unknown := e.elsewhere(ctx, r.Lease)
	held = append(held, elsewhere...)
	switch {
	case len(held) > 1:
		c.Status, c.Message = Failure, "held more than once, so that several work for the driver: "+strings.Join(held, "; ")
		c.Hint = "end all but one, or give them the same --leader-election-namespace (and --leader-election-id)"
	case len(held) == 1 && !e.plan.LeaderElection && c.Status == OK:
		c.Status, c.Message = Warning, held[0]+", and a process with these settings takes no notice: --leader-election is off"
		c.Hint = "set --leader-election, unless that holder is to be replaced at one stroke"
	case len(held) == 1 && len(elsewhere) == 1:
		c.Status, c.Message = Warning, held[0]+", in another namespace: it would work beside"
		c.Hint = "set the same --leader-election-namespace, or end the other one"
	case unknown != nil && c.Status == OK:
		c.Message += "; other namespaces were not looked at (" + reason(unknown) + ")"
	}
	e.report.Checks = append(e.report.Checks, c)
}

// judge says of a Lease who holds it.
func (e *examination) judge(name string, lease *coordinationv1.Lease) Check {
	c := Check{Name: name, Status: OK, Message: describe(lease, e.now())}
	if ptr.Deref(lease.Spec.HolderIdentity, "") == "" {
		c.Message = "held by nobody: the last holder has released it"
		return c
	}
	if !alive(lease, e.now()) {
		c.Status, c.Hint = Warning, "nobody works for this role, unless leader election is off: is a replica running, and what does it log?"
	}
	return c
}

// elsewhere is the holders of Leases called name in other namespaces.
func (e *examination) elsewhere(ctx context.Context, name string) (held []string, err error) {
	list, err := e.client.CoordinationV1().Leases(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, name).String(),
	})
	if err != nil {
		return nil, err
	}
	for _, l := range list.Items {
		if l.Namespace != e.plan.LeaseNamespace && alive(&l, e.now()) {
			held = append(held, describe(&l, e.now()))
		}
	}
	return held, nil
}

// alive tells whether somebody holds lease.
func alive(lease *coordinationv1.Lease, now time.Time) bool {
	s := lease.Spec
	return ptr.Deref(s.HolderIdentity, "") != "" && s.RenewTime != nil &&
		now.Before(s.RenewTime.Add(time.Duration(ptr.Deref(s.LeaseDurationSeconds, 0))*time.Second+2*time.Second)) // clocks are compared to a second
}

func describe(lease *coordinationv1.Lease, now time.Time) string {
	s := lease.Spec
	text := fmt.Sprintf("%s/%s held by %s", lease.Namespace, lease.Name, ptr.Deref(s.HolderIdentity, ""))
	if s.RenewTime == nil {
		return text
	}
	age := max(0, now.Sub(s.RenewTime.Time)).Round(time.Second)
	if alive(lease, now) {
		return fmt.Sprintf("%s, renewed %v ago", text, age)
	}
	return fmt.Sprintf("%s, and expired: renewed %v ago for %ds", text, age, ptr.Deref(s.LeaseDurationSeconds, 0))
}

// reason is err in a few words.
func reason(err error) string {
	if apierrors.IsForbidden(err) {
		return "forbidden"
	}
	return err.Error()
}
