// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

// story is a test that passes or fails on a Kubernetes version.
type story struct {
	role string
	does string
	test string // function of test/e2e, or demo
}

const demo = "make demo"

// stories are the rows of docs/support-matrix.md.
var stories = []story{
	{"all", "PVCs, pods, expansion, snapshot and deletion with a driver whose volumes are directories", demo},
	{"all", "StatefulSet: scaled up, scaled down, deleted", "TestLifeOfAStatefulSet"},
	{"all", "Rolling change from the sidecars and back, while PVCs and pods are created and deleted", "TestRollingChange"},
	{"all", "The API server restarts", "TestAPIServerRestarts"},
	{"all", "One watch per kind, one connection", "TestOneWatchPerKindAndOneConnection"},
	{"provision", "Number of CSI calls and API writes per volume", "TestOneCallAndFewWritesPerVolume"},
	{"provision", "Killed while CreateVolume runs", "TestKilledWhileCreating"},
	{"provision", "PVC deleted while CreateVolume runs", "TestClaimDeletedWhileItsVolumeIsBeingCreated"},
	{"provision", "A PersistentVolume is deleted before its PVC", "TestVolumeDeletedBeforeItsClaimIsReclaimed"},
	{"attach", "A pod moves from a node that is cordoned, deleted or out of service", "TestPodMoves"},
	{"attach", "Killed while ControllerPublishVolume runs", "TestKilledWhileAttaching"},
	{"attach", "A return to csi-attacher removes the finalizer", "TestRollbackOfTheAttachersFinalizer"},
	{"capacity", "The scheduler follows the CSIStorageCapacity objects", "TestSchedulerFollowsCapacity"},
	{"resize", "Expansion and VolumeAttributesClass, capabilities, replicas", "TestResizerScenario"},
	{"resize", "Expansion within a ResourceQuota", "TestExpansionWithinQuota"},
	{"snapshot", "Snapshots and group snapshots with the snapshot-controller: counts, restore, deletion, kill", "TestSnapshots"},
	{"snapshot", "CRDs appear and disappear, replicas, flags", "TestSnapshotterScenarioProcess"},
	{"nodecontroller", "A node is deleted", "TestNodeIsLost"},
	{"nodecontroller", "A node returns", "TestNodeComesBack"},
	{"nodecontroller", "A node is drained", "TestNodeIsDrained"},
	{"nodecontroller", "Webhooks", "TestNodecontrollerScenarioWebhookManifest"},
	{"manifests", "Accepted by the API server", "TestWhatIsShippedIsAccepted"},
	{"manifests", "Permissions are sufficient and minimal: overlays all-in-one and per-role", "TestOverlaysNeedWhatTheyGrant"},
	{"manifests", "Permissions are sufficient and minimal: overlay node", "TestOverlayOfNodesNeedsWhatItGrants"},
	{"manifests", "Permissions are sufficient and minimal: node controller", "TestNodecontrollerNeedsWhatItsManifestsGrant"},
	{"manifests", "ValidatingAdmissionPolicy", "TestPolicyRestrictsTheServiceAccount"},
}
