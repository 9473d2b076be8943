// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package main

// mutation removes one rule of the product.
type mutation struct {
	name string
	rule string // what the product does without the mutation
	place
	target target
	text   string // instead of the target
}

// Texts for conditions.
const (
	never  = "false"
	always = "true"
)

var mutations = []mutation{
	{"delete-without-live-read", "The API server is asked for the PersistentVolume before DeleteVolume.",
		in("provisioner", "volumeLoop.deleteVolume"), call("Refetch", "pv"), "pv, true, error(nil)"},
	{"delete-with-one-read", "The API server is asked for the PersistentVolume before each DeleteVolume.",
		in("provisioner", "volumeLoop.deleteVolume"), call("Refetch", "pv"), `func() (*corev1.PersistentVolume, bool, error) {
			first := false
			l.record(pv, func(r *removal) { first = time.Since(r.began) == 0 })
			if !first {
				return pv, true, nil
			}
			return l.volumes.Refetch(ctx, l.c.deps.Client.CoreV1().PersistentVolumes(), pv)
		}()`},
	{"delete-a-changed-volume", "DeleteVolume is decided again if the live PersistentVolume differs from the cache.",
		in("provisioner", "volumeLoop.deleteVolume"), operand("live", "pv", "ResourceVersion"), never},
	{"delete-while-attached", "DeleteVolume waits for the detachment.",
		in("provisioner", "volumeLoop.attachments"), argument(1, "ByIndex"), "of.Name[:0]"},
	{"delete-changed-meanwhile", "DeleteVolume looks for a later PersistentVolume after the live read.",
		in("provisioner", "volumeLoop.deleteVolume"), operand("newest", "live"), "newest == nil"},
	{"release-unrecorded-snapshot", "CreateSnapshot is repeated if the snapshot-controller has removed its record.",
		in("snapshotter", "content.calledBefore"), condition("policy", "VolumeSnapshotContentDelete"), never},
	{"ignore-lost-publication", "A publication that ListVolumes does not show is repeated.",
		in("attacher", "reconciler.enqueueDifferences"), condition("published", "attached", "needsRepublish"),
		"published || !needsRepublish(s.attachment)"},
	{"delete-in-any-phase", "DeleteVolume is called for Released volumes only.",
		in("provisioner", "driver.decideVolume"), condition("Phase", "VolumeReleased"), never},
	{"delete-retained", "The policy Retain keeps the volume.",
		in("provisioner", "reclaims"), operand("PersistentVolumeReclaimDelete"), `policy != "Recycle"`},
	{"stale-retain", "The finalizer of a volume is removed only if the API server still has the policy Retain.",
		in("provisioner", "driver.decideVolume"), value("Tests"), "nil"},
	{"failed-deletion", "A deletion of a PersistentVolume that fails is repeated.",
		in("provisioner", "volumeLoop.apply"), operand("IsNotFound"), "ctx.Err() != nil"},
	{"unknown-is-final", "CreateVolume is repeated while its outcome is unknown.",
		in("provisioner", "claimLoop.createVolume"), condition("OutcomeOf", "Indeterminate"), never},
	{"no-record", "The claim is protected before CreateVolume.",
		in("provisioner", "driver.policy"), operand("ProvisioningProtection", "ProtectionAlways"), never},
	{"no-record-on-retry", "The claim is protected after the first CreateVolume whose outcome is unknown.",
		in("internal/intent", "recordsAtOnce"), operand("Writable"), never},
	{"record-removed-early", "The protection of a claim ends with a final result.",
		in("provisioner", "driver.recordOn"), condition("own"), "own || true"},
	{"release-used-claim", "The protection of a deleted claim that pods use stays.",
		in("provisioner", "unprotection"), value("RemoveFinalizers"),
		`map[bool][]string{false: {kube.ProvisioningFinalizer}, true: claim.Finalizers}[claim.DeletionTimestamp != nil]`},
	{"resume-another-request", "A recorded request that has changed is not sent.",
		in("provisioner", "driver.resume"), statement("errRequestChanged", "an object that"), "err = nil"},
	{"release-a-deleted-node", "The finalizer of a Node that is being deleted stays for the grace period.",
		in("nodecontroller/nodecleanup", "keepsFinalizer"), statement("drains"), "drains := false"},
	{"publish-before-finalizer", "The VolumeAttachment has the finalizer before ControllerPublishVolume.",
		in("attacher", "attachmentState.inOrder"), condition("AppliedTo"), always},
	{"publish-unprotected-volume", "The PersistentVolume has the finalizer before ControllerPublishVolume.",
		in("attacher", "driver.decideAttach"), condition("Contains", "Finalizers", "pv"), never},
	{"detach-without-unpublish", "ControllerUnpublishVolume is called before the finalizer is removed.",
		in("attacher", "driver.decideDetach"), statement("doUnpublish", "Deleting"),
		`call := step{action: doRemoveFinalizer, reason: "Deleting", source: src, nodeID: nodeIDs[0]}`},
	{"release-attached-volume", "The finalizer of a PersistentVolume stays while a VolumeAttachment names it.",
		in("attacher", "driver.releasable"), operand("attachments"), always},
	{"restarted-holder", "A restarted holder of the Lease ends when it is told to.",
		in("election", "Candidate.term"), condition("!acquired"), "!elector.IsLeader() || false && !acquired"},
	{"volume-of-an-old-list", "The attacher reads a PersistentVolume that the first list shows as it was before the term.",
		in("attacher", "term.gather"), statement("volumeUnconfirmed", "fresh"), "s.volumeUnconfirmed = false"},
	{"no-back-off", "A failed attempt is repeated after a delay.", in("internal/workloop", "Loop.requeueFailed"), call("backoff"), "0"},
	{"delete-without-uid", "The deletion of a PersistentVolume names its UID.",
		in("provisioner", "volumeLoop.apply"), value("Preconditions"),
		"&metav1.Preconditions{ResourceVersion: ptr.To(pv.ResourceVersion)}"},
	{"work-after-the-loss", "A lost Lease ends the term.",
		in("election", "Candidate.term"), statement("loseLease", "endTerm", "lost"), "lose := func() { _, _ = loseLease, endTerm }"},
	{"no-own-writes", "A controller sees its own writes before the watch delivers them.",
		in("internal/kube", "MutationCache.Get"), condition("observedByWatch"), never},
	{"finalizers-overwritten", "A patch of finalizers fails if another writer has changed them.",
		in("internal/kube", "MetadataPatch.finalizerOps"), statement("test", "have", "want"),
		`return []any{jsonPatchOp{"replace", path, want}}`},
	{"expand-without-record", "The claim records the size before ControllerExpandVolume.",
		in("resizer", "driver.decideExpandCall"), call("intends"), always},
	{"expand-to-another-size", "While the outcome of ControllerExpandVolume is unknown, no other size is requested.",
		in("resizer", "operation.callOf"), condition("recorded", "MayHaveEffect"), "recorded && o == modify && c.Args != t.key"},
	{"claim-before-volume", "The PersistentVolume has the new size before the claim.",
		in("resizer", "driver.decideAnswer"), condition("volumeSaved"), never},
	{"modify-to-another-class", "While the outcome of ControllerModifyVolume is unknown, no other class is requested.",
		in("resizer", "driver.decideModify"), condition("unknown", "requested"), `inProgress && requested == ""`},
	{"unknown-is-infeasible", "An expansion whose outcome is unknown is not recorded as infeasible.",
		in("resizer", "outcomeOf"), statement("indeterminate"), "return infeasible"},
	{"modify-without-record", "The claim records the class before ControllerModifyVolume.",
		in("resizer", "driver.decideModifyCall"), call("intends"), always},
	{"snapshot-without-record", "The content records the request before CreateSnapshot.",
		in("snapshotter", "driver.decideCreate"), condition("AppliedTo"), always},
	{"snapshot-with-another-request", "CreateSnapshot is repeated with the recorded request.",
		in("snapshotter", "driver.createRequest"), operand("binds"), "class == nil"},
	{"forget-unknown-snapshot", "CreateSnapshot is repeated until its outcome is known, also for a deleted content.",
		in("snapshotter", "driver.rowOf"), condition("indeterminate"), never},
	{"delete-snapshot-without-live-read", "The API server is asked for the content before DeleteSnapshot.",
		in("snapshotter", "driver.decideDelete"), condition("read", "IsZero"), never},
	{"delete-unreleased-snapshot", "The snapshot-controller releases the deletion of a snapshot.",
		in("snapshotter", "content.released"), call("has", "deleting"), "c.terminating()"},
	{"delete-retained-snapshot", "The policy Retain keeps the snapshot.",
		in("snapshotter", "driver.rowOf"), operand("policy", "VolumeSnapshotContentDelete"), `c.policy != snapshotv1.DeletionPolicy("")`},
	{"stale-retain-of-snapshot", "The finalizer of a content is removed only if the API server still has the policy Retain.",
		in("snapshotter", "state.decideRelease"), statement("/spec/deletionPolicy"), "_ = c.policy"},
	{"obsolete-capacity", "The CSIStorageCapacity of a segment without nodes is deleted.",
		in("capacity", "decide"), condition("hasNodes", "inGrace"), never},
	{"two-capacities", "A second CSIStorageCapacity for a StorageClass and a segment is deleted.",
		in("capacity", "decide"), statement("keep", "remove"), "p.keep = objects[0]"},
	{"old-capacity", "GetCapacity is called again after --capacity-poll-interval.",
		in("capacity", "term.sync"), argument(1, "nextPoll"), "100*t.c.cfg.PollInterval"},
	{"clean-at-once", "The cleanup waits for --node-missing-grace.",
		in("nodecontroller/nodecleanup", "checkGrace"), call("Add", "NodeMissingGrace"), "r.Since"},
	{"clean-many-nodes", "The breaker limits how many nodes are cleaned up.",
		in("nodecontroller/nodecleanup", "verdict"), statement("Open", "waits"), "v.Open = waits && false"},
	{"clean-changed-object", "A deletion carries the resourceVersion that was checked.",
		in("nodecontroller/nodecleanup", "preconditions"), value("ResourceVersion"), "nil"},
	{"clean-without-pods", "The API server is asked for the pods before a claim is deleted.",
		in("nodecontroller/nodecleanup", "apiServer.pods"), statement("pods", "list"), "pods, err := []*corev1.Pod(nil), error(nil)"},
	{"clean-without-attachments", "The API server is asked for the VolumeAttachments before a volume is removed.",
		in("nodecontroller/nodecleanup", "apiServer.attachments"), statement("all", "list"),
		"all, err := []*storagev1.VolumeAttachment(nil), error(nil)"},
	{"clean-used-claim", "A claim that a pod uses on another node is kept.",
		in("nodecontroller/nodecleanup", "checkUse"), condition("Users"), never},
	{"clean-forbidden", "The owner of a claim can forbid its cleanup.",
		in("nodecontroller/nodecleanup", "checkOptOut"), condition("optOut", "kind"), "ok && obj == nil"},
	{"clean-for-claim-only", "The owners of volumes, StorageClasses and Namespaces can forbid the cleanup.",
		in("nodecontroller/nodecleanup", "checkOptOut"), condition("optOut", "kind"),
		`ok && kind == "PersistentVolumeClaim" && s.optOut(kind, obj) != ""`},
	{"clean-retained", "The claim of a volume with the policy Retain is kept.",
		in("nodecontroller/nodecleanup", "checkRetain"), condition("policy", "kept"), `kept && policy == ""`},
}
