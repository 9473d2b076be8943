// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

// mutation removes one rule of the product.
type mutation struct {
	name string
	rule string // what the product does without the mutation
	file string // relative to the root of the repository
	old  string // occurs once in file
	new  string
}

var mutations = []mutation{
	{"delete-without-live-read", "The API server is asked for the PersistentVolume before DeleteVolume.", "provisioner/volume_apply.go",
		"live, exists, err := l.volumes.Refetch(ctx, l.c.deps.Client.CoreV1().PersistentVolumes(), pv)",
		"live, exists, err := pv, true, error(nil)"},
	{"delete-a-changed-volume", "DeleteVolume is decided again if the live PersistentVolume differs from the cache.",
		"provisioner/volume_apply.go", "case !exists, live.ResourceVersion != pv.ResourceVersion:", "case !exists:"},
	{"delete-while-attached", "DeleteVolume waits for the detachment.", "provisioner/volume_decide.go",
		"case d.publishes && len(s.attachments) > 0:", "case false:"},
	{"delete-in-any-phase", "DeleteVolume is called for Released volumes only.", "provisioner/volume_decide.go",
		"case pv.Status.Phase != corev1.VolumeReleased:", "case false:"},
	{"delete-retained", "The policy Retain keeps the volume.", "provisioner/pv.go",
		`return policy == "" || policy == corev1.PersistentVolumeReclaimDelete`, `return policy != "Recycle"`},
	{"stale-retain", "The finalizer of a volume is removed only if the API server still has the policy Retain.",
		"provisioner/volume_decide.go", `map[string]any{"/spec/persistentVolumeReclaimPolicy": pv.Spec.PersistentVolumeReclaimPolicy},`, "nil,"},
	{"failed-deletion", "A deletion of a PersistentVolume that fails is repeated.", "provisioner/volume_apply.go",
		"if err != nil && !kube.IsNotFound(err) {", "if err != nil && ctx.Err() != nil {"},
	{"unknown-is-final", "CreateVolume is repeated while its outcome is unknown.", "provisioner/create_volume.go",
		"if csiclient.OutcomeOf(err) == csiclient.Indeterminate {", "if csiclient.OutcomeOf(err) == 99 {"},
	{"no-record", "The claim is protected before CreateVolume.", "provisioner/decide.go",
		"if d.canProtect() && (d.ProvisioningProtection == ProtectionAlways ||", "if d.canProtect() && (false ||"},
	{"record-removed-early", "The protection of a claim ends with a final result.", "provisioner/decide.go",
		"case isProtected(d.claim) && (hasVolume || d.op.recordedOn(d.claim)):", "case isProtected(d.claim):"},
	{"wait-for-a-bound-volume", "A claim does not wait for the deletion of a bound volume.", "provisioner/decide.go",
		"deleted := pv != nil && pv.DeletionTimestamp != nil && pv.Status.Phase != corev1.VolumeBound",
		"deleted := pv != nil && pv.DeletionTimestamp != nil"},
	{"publish-before-finalizer", "The VolumeAttachment has the finalizer before ControllerPublishVolume.", "attacher/decide.go",
		"if !change.AppliedTo(s.attachment) {", "if false {"},
	{"publish-unprotected-volume", "The PersistentVolume has the finalizer before ControllerPublishVolume.", "attacher/decide.go",
		"if !slices.Contains(pv.Finalizers, d.finalizer) {", "if false {"},
	{"detach-without-unpublish", "ControllerUnpublishVolume is called before the finalizer is removed.", "attacher/decide.go",
		`return step{action: doUnpublish, reason: "Deleting", source: src, nodeID: nodeID}`,
		`return step{action: doRemoveFinalizer, reason: "Deleting", nodeID: nodeID}`},
	{"release-attached-volume", "The finalizer of a PersistentVolume stays while a VolumeAttachment names it.", "attacher/finalizer.go",
		"return attachments == 0 && d.releasesUnused(pv)", "return d.releasesUnused(pv)"},
	{"restarted-holder", "A restarted holder of the Lease ends when it is told to.", "election/election.go",
		"if _, acquired := c.lock.written(); !acquired {", "if !elector.IsLeader() {"},
	{"no-own-writes", "A controller sees its own writes before the watch delivers them.", "internal/kube/mutation_cache.go",
		"if !o.observedByWatch(w) {", "if false {"},
	{"finalizers-overwritten", "A patch of finalizers fails if another writer has changed them.", "internal/kube/patch.go",
		`return []any{jsonPatchOp{"test", path, have}, jsonPatchOp{"replace", path, want}}`, `return []any{jsonPatchOp{"replace", path, want}}`},
	{"expand-without-record", "The claim records the size before ControllerExpandVolume.", "resizer/decide_expand.go",
		"case !s.intends(t):", "case false:"},
	{"expand-to-another-size", "While the outcome of ControllerExpandVolume is unknown, no other size is requested.",
		"resizer/decide_expand.go", "known := status == controllerInfeasible || s.memory.settled == bytesOf(allocated)", "known := true"},
	{"expand-unconfirmed", "The API server is asked for the claim before the first ControllerExpandVolume of a term.",
		"resizer/decide_expand.go",
		"\tcase !s.confirmed:\n\t\treturn step{action: doReadClaim, reason: \"Unconfirmed\"}\n\t}\n\treturn step{action: doExpand,",
		"\t}\n\treturn step{action: doExpand,"},
	{"claim-before-volume", "The PersistentVolume has the new size before the claim.", "resizer/decide_expand.go",
		"if a.err == nil && !a.volumeSaved {", "if false {"},
	{"modify-without-record", "The claim records the class before ControllerModifyVolume.", "resizer/decide_modify.go",
		"case current != modification{corev1.PersistentVolumeClaimModifyVolumeInProgress, t.class}:", "case current != current:"},
	{"snapshot-without-record", "The content records the request before CreateSnapshot.", "snapshotter/decide.go",
		"if !change.AppliedTo(c.meta) {", "if false {"},
	{"snapshot-with-another-request", "CreateSnapshot is repeated with the recorded request.", "snapshotter/request.go",
		"if recorded, err := c.recordedRequest(); err == nil && recorded != nil {",
		"if recorded, err := c.recordedRequest(); err == nil && recorded != nil && class == nil {"},
	{"snapshot-unconfirmed", "The API server is asked for the content before the first CreateSnapshot of a term.", "snapshotter/decide.go",
		"if !s.memory.confirmed {", "if false {"},
	{"forget-unknown-snapshot", "CreateSnapshot is repeated until its outcome is known, also for a deleted content.",
		"snapshotter/decide.go", "case c.indeterminate(m):", "case false:"},
	{"delete-snapshot-without-live-read", "The API server is asked for the content before DeleteSnapshot.", "snapshotter/decide_delete.go",
		"case !s.live:", "case false:"},
	{"delete-unreleased-snapshot", "The snapshot-controller releases the deletion of a snapshot.", "snapshotter/decide.go",
		"return c.has(c.deleting) ||", "return c.terminating() ||"},
	{"delete-retained-snapshot", "The policy Retain keeps the snapshot.", "snapshotter/decide.go",
		"case c.policy == snapshotv1.VolumeSnapshotContentDelete && ", `case c.policy != snapshotv1.DeletionPolicy("") && `},
	{"stale-retain-of-snapshot", "The finalizer of a content is removed only if the API server still has the policy Retain.",
		"snapshotter/decide_delete.go", `map[string]any{"/spec/deletionPolicy": c.policy}`, "map[string]any{}"},
}
