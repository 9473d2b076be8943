// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/tools/clock"
	"github.com/storage-controller/storage-controller/internal/tools/finding"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// explainDriver reports whether the driver is installed, on which nodes it is registered, and who holds its Leases.
func explainDriver(e *explanation) {
	if e.driver == "" {
		return
	}
	registered := namesOf(slices.DeleteFunc(slices.Clone(e.csiNodes.Value), func(n *storagev1.CSINode) bool {
		return kube.DriverOnNode(n, e.driver) == nil
	}))
	slices.Sort(registered)
	if e.csiDriver.Missing {
		held := slices.ContainsFunc(e.leases, func(l leaseFact) bool { return slices.ContainsFunc(l.leases.Value, e.holds) })
		if len(registered) > 0 || held {
			e.ok("driver", "CSIDriver %q not found; defaults apply (attachRequired=true, storageCapacity=false).", e.driver)
		} else {
			e.unknown("driver", "CSIDriver %q not found: the driver is not installed, or does not create one.", e.driver).
				SetNext("Verify that driver %s and its controller are installed and running: `kubectl get pods -A`.", e.driver)
		}
	}
	switch {
	case !e.csiNodes.Found:
	case len(registered) == 0:
		e.unknown("driver", "Driver %s is registered on 0 of %s.", e.driver, finding.Plural(len(e.csiNodes.Value), "node")).
			SetNext("Check that the node plugin of driver %s runs and registers: `kubectl get csinodes`.", e.driver)
	default:
		e.ok("driver", "Driver %s is registered on %d of %s: %s.", e.driver, len(registered),
			finding.Plural(len(e.csiNodes.Value), "node"), kube.ShortList(registered, 5))
	}
	explainLeases(e)
}

// explainLeases reports the holders of the Leases of all roles that were read.
func explainLeases(e *explanation) {
	for _, fact := range e.leases {
		held := slices.ContainsFunc(fact.leases.Value, e.holds)
		for _, lease := range fact.leases.Value {
			if !held || e.holds(lease) { // else of a former installation
				explainHolder(e, fact, lease)
			}
		}
		if !fact.leases.Found || len(fact.leases.Value) > 0 {
			continue
		}
		const message = "No Lease %q: no %s runs for driver %s, or it runs without --leader-election or with another Lease."
		if fact.role == roleNodecontroller { // optional
			e.ok("driver", message, fact.name, fact.role, fact.driver)
		} else {
			e.unknown("driver", message, fact.name, fact.role, fact.driver).
				SetNext("Verify that the %s runs for driver %s: `kubectl get pods -A`.", fact.role, fact.driver)
		}
	}
}

func explainHolder(e *explanation, fact leaseFact, lease *coordinationv1.Lease) {
	holder, name := ptr.Deref(lease.Spec.HolderIdentity, ""), lease.Namespace+"/"+lease.Name
	severity := finding.Blocked
	if fact.role == roleNodecontroller && !e.needsNodecontroller(fact.driver) {
		severity = finding.Unknown // optional, may be disabled
	}
	var added *finding.Finding
	switch {
	case holder == "":
		added = e.add(severity, "driver", "Lease %s has no holder: no %s of driver %s is active with it.", name, fact.role, fact.driver)
	case !e.holds(lease):
		renewed := "never renewed"
		if lease.Spec.RenewTime != nil {
			renewed = "last renewed " + e.age(lease.Spec.RenewTime.Time) + " ago"
		}
		added = e.add(severity, "driver",
			"Lease %s of %q has expired (%s): no %s of driver %s is active with it.", name, holder, renewed, fact.role, fact.driver)
	default:
		e.ok("driver", "The %s of driver %s is %q%s, which holds Lease %s.", fact.role, fact.driver, holder, programOf(lease), name)
		return
	}
	if severity == finding.Blocked {
		added.SetNext("Check that the %s of driver %s runs: `kubectl -n %s get pods`.", fact.role, fact.driver, lease.Namespace)
	}
}

// holds reports whether a process holds lease.
func (f *facts) holds(lease *coordinationv1.Lease) bool { return clock.IsHeld(lease, f.now) }

// needsNodecontroller reports whether the nodecontroller of driver has work: a deleted node with its finalizer, or the
// record of a lost node.
func (f *facts) needsNodecontroller(driver string) bool {
	finalizer := nodecontroller.NodeFinalizer(driver)
	if f.node.Found && f.node.Value.DeletionTimestamp != nil && slices.Contains(f.node.Value.Finalizers, finalizer) {
		return true
	}
	return slices.ContainsFunc(f.lost, func(n lostNode) bool { return n.driver == driver && !n.OptedOut })
}

// programOf returns in parentheses the program that wrote lease last, by its field manager; "" if the API server does not say.
func programOf(lease *coordinationv1.Lease) string {
	var newest *time.Time
	manager := ""
	for _, m := range lease.ManagedFields {
		if m.Time != nil && (newest == nil || m.Time.After(*newest)) {
			newest, manager = &m.Time.Time, m.Manager
		}
	}
	switch manager {
	case "":
		return ""
	case "csi-provisioner", "csi-attacher", "csi-resizer", "csi-snapshotter", "topolvm-controller":
		manager = "sidecar " + manager
	}
	return " (" + manager + ")"
}
