package nodecontroller

import (
	"strings"
	"time"
)

// What follows lets others tell people what the controller and the administrator have
// noted on objects, without a controller.

// Notes is what annotations of an object say to the controller of a driver; see
// [annotations] for which kinds have them.
type Notes struct {
	Cleanup      string // enabled or disabled
	LocalData    string
	MissingSince string // RFC 3339
	LostNode     string // names, separated by commas
	Hold         string
}

// NotesOf reads the annotations of an object.
func NotesOf(driver string, have map[string]string) Notes {
	a := annotationsOf(driver)
	return Notes{Cleanup: have[a.cleanup], LocalData: have[a.localData], MissingSince: have[a.missing], LostNode: have[a.lostNode], Hold: have[a.hold]}
}

// CleanupAnnotation is the annotation by which objects opt in or out.
func CleanupAnnotation(driver string) string { return annotationsOf(driver).cleanup }

// ApproveAnnotation is the annotation of a CSIDriver by which lost nodes are approved.
func ApproveAnnotation(driver string) string { return annotationsOf(driver).approve }

// Approved tells whether the annotations of a CSIDriver approve that node is lost. The error
// says why a part of them has no effect.
func Approved(driver string, have map[string]string, node string, now time.Time) (bool, error) {
	a, err := annotationsOf(driver).parseApproval(have, now)
	return a.covers([]string{node}), err
}

// LeaseName is the name of the Lease for driver where no flag changes it.
func LeaseName(driver string) string { return leaseName(strings.ToLower(driver)) }

// Finalizers is the finalizers on nodes and on claims for driver where no flag changes them.
func Finalizers(driver string) (node, claim string) {
	d := strings.ToLower(driver)
	return d + "/node", d + "/pvc"
}
