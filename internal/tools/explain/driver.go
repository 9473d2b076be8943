package explain

import (
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/utils/ptr"

	"github.com/storage-controller/storage-controller/internal/kube"
	"github.com/storage-controller/storage-controller/internal/migration"
	"github.com/storage-controller/storage-controller/nodecontroller"
)

// admin is who looks after the driver.
const (
	admin      = "The cluster administrator"
	ownerOf    = "The owner of the claim"
	noDeployer = admin + " installs the driver, or storage-controller beside it, or looks why it does not start: `kubectl get pods -A`"
)

// aboutDriver is whether the driver is there, on which nodes, and who works for it.
func (f *facts) aboutDriver(roles ...string) findings {
	var l findings
	if f.driver == "" {
		return l
	}
	switch d := f.csiDriver; {
	case d.why != "":
		l.add(Unknown, "driver", "", "CSIDriver %q: %s.", f.driver, d.why)
	case d.absent() && f.driverIsThere():
		l.add(Fine, "driver", "", "There is no CSIDriver object %q: the driver does without one.", f.driver)
	case d.absent():
		l.add(Unknown, "driver", noDeployer+".", "There is no CSIDriver object %q: the driver is not installed, or does without one.", f.driver)
	}
	switch n := f.csiNodes; {
	case n.why != "":
		l.add(Unknown, "driver", "", "On which nodes driver %s is registered is %s.", f.driver, n.why)
	case n.found:
		names := registeredOn(n.value, f.driver)
		if len(names) == 0 {
			l.add(Unknown, "driver", admin+" looks why the node part of driver "+f.driver+" does not run: `kubectl get csinodes`.",
				"Driver %s is registered on none of %s.", f.driver, count(len(n.value), "node"))
		} else {
			l.add(Fine, "driver", "", "Driver %s is registered on %d of %s: %s.", f.driver, len(names), count(len(n.value), "node"), list(names))
		}
	}
	for _, lease := range f.leases {
		if slices.Contains(roles, lease.role) {
			l = append(l, f.aboutLease(lease)...)
		}
	}
	return l
}

// driverIsThere tells whether the driver is registered on a node, or somebody holds a Lease
// for it. It is installed then, and to advise that would mislead.
func (f *facts) driverIsThere() bool {
	if len(registeredOn(f.csiNodes.value, f.driver)) > 0 {
		return true
	}
	for _, fact := range f.leases {
		for _, lease := range fact.leases.value {
			if fact.driver == f.driver && ptr.Deref(lease.Spec.HolderIdentity, "") != "" && !f.runOut(lease) {
				return true
			}
		}
	}
	return false
}

// registeredOn is the names of the nodes that have driver.
func registeredOn(nodes []storagev1.CSINode, driver string) []string {
	var names []string
	for _, n := range nodes {
		if kube.DriverOnNode(&n, driver) != nil {
			names = append(names, n.Name)
		}
	}
	slices.Sort(names)
	return names
}

// aboutLease is who holds the Lease of a role, in each namespace in which there is one.
func (f *facts) aboutLease(fact leaseFact) findings {
	var l findings
	if fact.leases.why != "" {
		l.add(Unknown, "driver", "", "Who is the %s of driver %s is %s.", fact.role, fact.driver, fact.leases.why)
		return l
	}
	if len(fact.leases.value) == 0 {
		severity, next := Unknown, admin+" looks whether a "+fact.role+" runs for driver "+fact.driver+": `kubectl get pods -A`."
		if fact.role == roleNodecontroller { // which is an option
			severity, next = Fine, ""
		}
		l.add(severity, "driver", next, "There is no Lease %q: no %s runs for driver %s, or one that works without leader election.", fact.name, fact.role, fact.driver)
		return l
	}
	for _, lease := range fact.leases.value {
		f.aboutHolder(&l, fact, lease)
	}
	return l
}

func (f *facts) aboutHolder(l *findings, fact leaseFact, lease coordinationv1.Lease) {
	who, name := ptr.Deref(lease.Spec.HolderIdentity, ""), lease.Namespace+"/"+lease.Name
	severity, next := Blocked, admin+" looks why no "+fact.role+" of driver "+fact.driver+" runs in namespace "+lease.Namespace+": `kubectl -n "+lease.Namespace+" get pods`."
	if fact.role == roleNodecontroller && !f.needsNodecontroller(fact.driver) {
		severity, next = Unknown, "" // an option, which may have been switched off
	}
	switch {
	case who == "":
		l.add(severity, "driver", next, "Nobody holds Lease %s, so that no %s works for driver %s.", name, fact.role, fact.driver)
	case f.runOut(lease):
		l.add(severity, "driver", next, "Lease %s of %q was renewed %s for the last time, and has run out: no %s works for driver %s.",
			name, who, f.ago(renewedAt(lease)), fact.role, fact.driver)
	default:
		l.add(Fine, "driver", "", "The %s of driver %s is %q, %s, which holds Lease %s.", fact.role, fact.driver, who, programOf(lease), name)
	}
}

// needsNodecontroller tells whether something is left to the nodecontroller of driver: a
// node that its finalizer keeps, or a volume on which a lost node is noted.
func (f *facts) needsNodecontroller(driver string) bool {
	if node, _ := nodecontroller.Finalizers(driver); f.node.found && f.node.value.DeletionTimestamp != nil && slices.Contains(f.node.value.Finalizers, node) {
		return true
	}
	volumes := f.volumes.value
	if f.volume.found {
		volumes = append(slices.Clone(volumes), *f.volume.value)
	}
	return slices.ContainsFunc(volumes, func(pv corev1.PersistentVolume) bool {
		return migration.DriverOfVolume(&pv) == driver && nodecontroller.NotesOf(driver, pv.Annotations).LostNode != ""
	})
}

// renewedAt is when the holder of lease renewed it for the last time; zero for never.
func renewedAt(lease coordinationv1.Lease) time.Time {
	if t := lease.Spec.RenewTime; t != nil {
		return t.Time
	}
	return time.Time{}
}

// runOut tells whether the holder of lease has not renewed it for as long as it lasts.
func (f *facts) runOut(lease coordinationv1.Lease) bool {
	lasts := time.Duration(ptr.Deref(lease.Spec.LeaseDurationSeconds, 15)) * time.Second
	return !renewedAt(lease).Add(lasts).After(f.now)
}

// ourManager is the name under which the API server notes what our processes write.
const ourManager = "storage-controller"

// programOf tells by the newest write who the holder of lease is. Every program writes
// under the name that its user agent begins with.
func programOf(lease coordinationv1.Lease) string {
	var newest *time.Time
	manager := ""
	for _, m := range lease.ManagedFields {
		if m.Time != nil && (newest == nil || m.Time.After(*newest)) {
			newest, manager = &m.Time.Time, m.Manager
		}
	}
	switch manager {
	case "":
		return "of which it is not known what program it is"
	case ourManager:
		return "a storage-controller"
	case "csi-provisioner", "csi-attacher", "topolvm-controller":
		return "an old sidecar (" + manager + ")"
	}
	return "another program (" + manager + ")"
}

// attaches tells whether volumes of the driver are attached at all; true when that is not known.
func (f *facts) attaches() bool {
	d := f.csiDriver
	return !d.found || d.value.Spec.AttachRequired == nil || *d.value.Spec.AttachRequired
}
