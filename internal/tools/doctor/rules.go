// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

// Code generated from deploy/rbac by make generate. DO NOT EDIT.

package doctor

// rules are the rules of deploy/rbac by the names of its directories.
var rules = map[string][]Rule{
	"attacher": {
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"volumeattachments"}, Verbs: []string{"get", "list", "watch", "patch"}},
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"volumeattachments/status"}, Verbs: []string{"patch"}},
		{Groups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"get", "list", "watch", "patch"}},
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"csinodes"}, Verbs: []string{"list", "watch"}},
	},
	"attacher-leader-election": {
		{Namespaced: true, Groups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get", "create", "update"}},
		{Namespaced: true, Groups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	},
	"attacher-secrets": {
		{Groups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}},
	},
	"capacity": {
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"storageclasses"}, Verbs: []string{"list", "watch"}},
		{Namespaced: true, Groups: []string{"storage.k8s.io"}, Resources: []string{"csistoragecapacities"}, Verbs: []string{"list", "watch", "create", "patch", "delete"}},
	},
	"capacity-leader-election": {
		{Namespaced: true, Groups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get", "create", "update"}},
		{Namespaced: true, Groups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	},
	"capacity-owner": {
		{Namespaced: true, Groups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get"}},
	},
	"capacity-owner-deployment": {
		{Namespaced: true, Groups: []string{"apps"}, Resources: []string{"replicasets"}, Verbs: []string{"get"}},
	},
	"capacity-topology": {
		{Groups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"list", "watch"}},
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"csinodes"}, Verbs: []string{"list", "watch"}},
	},
	"nodecontroller": {
		{Groups: []string{""}, Resources: []string{"nodes", "persistentvolumes", "persistentvolumeclaims"}, Verbs: []string{"get", "list", "watch"}},
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"storageclasses", "csinodes"}, Verbs: []string{"get", "list", "watch"}},
		{Groups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"get"}},
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"csidrivers"}, Verbs: []string{"get"}},
		{Groups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
		{Namespaced: true, Groups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"get", "list", "watch", "update"}},
		{Namespaced: true, Groups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"create"}},
	},
	"nodecontroller-cleanup": {
		{Groups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"delete"}},
		{Groups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list", "watch"}},
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"volumeattachments"}, Verbs: []string{"list", "watch"}},
	},
	"nodecontroller-cleanup-volumes": {
		{Groups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"patch", "delete"}},
	},
	"nodecontroller-leader-election": {
		{Namespaced: true, Groups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get", "create", "update"}},
	},
	"nodecontroller-node-finalizer": {
		{Groups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"patch"}},
	},
	"nodecontroller-pvc-enforce": {
		{Groups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"patch"}},
		{Groups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch", "delete"}},
	},
	"nodecontroller-pvc-strip": {
		{Groups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"patch"}},
	},
	"nodecontroller-resize-nudge": {
		{Groups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list", "watch", "patch"}},
	},
	"nodecontroller-secure-metrics": {
		{Groups: []string{"authentication.k8s.io"}, Resources: []string{"tokenreviews"}, Verbs: []string{"create"}},
		{Groups: []string{"authorization.k8s.io"}, Resources: []string{"subjectaccessreviews"}, Verbs: []string{"create"}},
	},
	"provisioner": {
		{Groups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"get", "list", "watch", "patch"}},
		{Groups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"get", "list", "watch", "create", "patch", "delete"}},
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"storageclasses"}, Verbs: []string{"list", "watch"}},
		{Groups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	},
	"provisioner-attachments": {
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"volumeattachments"}, Verbs: []string{"list", "watch"}},
	},
	"provisioner-cross-namespace": {
		{Groups: []string{"gateway.networking.k8s.io"}, Resources: []string{"referencegrants"}, Verbs: []string{"list", "watch"}},
	},
	"provisioner-leader-election": {
		{Namespaced: true, Groups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get", "create", "update"}},
	},
	"provisioner-secrets": {
		{Groups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}},
	},
	"provisioner-snapshots": {
		{Groups: []string{"snapshot.storage.k8s.io"}, Resources: []string{"volumesnapshots"}, Verbs: []string{"get", "list", "watch", "patch"}},
		{Groups: []string{"snapshot.storage.k8s.io"}, Resources: []string{"volumesnapshotcontents"}, Verbs: []string{"get"}},
	},
	"provisioner-topology": {
		{Groups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"list", "watch"}},
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"csinodes"}, Verbs: []string{"list", "watch"}},
	},
	"provisioner-volumeattributesclasses": {
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"volumeattributesclasses"}, Verbs: []string{"get", "list", "watch"}},
	},
	"resizer": {
		{Groups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"get", "list", "watch", "patch"}},
		{Groups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"get", "list", "watch"}},
		{Groups: []string{""}, Resources: []string{"persistentvolumeclaims/status"}, Verbs: []string{"patch"}},
		{Groups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	},
	"resizer-attachments": {
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"volumeattachments"}, Verbs: []string{"list", "watch"}},
	},
	"resizer-leader-election": {
		{Namespaced: true, Groups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get", "create", "update"}},
		{Namespaced: true, Groups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	},
	"resizer-pods": {
		{Groups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list", "watch"}},
	},
	"resizer-secrets": {
		{Groups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}},
	},
	"resizer-volumeattributesclasses": {
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"volumeattributesclasses"}, Verbs: []string{"get", "list", "watch"}},
	},
	"snapshotter": {
		{Groups: []string{"snapshot.storage.k8s.io"}, Resources: []string{"volumesnapshotcontents"}, Verbs: []string{"get", "list", "watch", "patch"}},
		{Groups: []string{"snapshot.storage.k8s.io"}, Resources: []string{"volumesnapshotcontents/status"}, Verbs: []string{"patch"}},
		{Groups: []string{"snapshot.storage.k8s.io"}, Resources: []string{"volumesnapshotclasses"}, Verbs: []string{"get", "list", "watch"}},
		{Groups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	},
	"snapshotter-groups": {
		{Groups: []string{"groupsnapshot.storage.k8s.io"}, Resources: []string{"volumegroupsnapshotcontents"}, Verbs: []string{"get", "list", "watch", "patch"}},
		{Groups: []string{"groupsnapshot.storage.k8s.io"}, Resources: []string{"volumegroupsnapshotcontents/status"}, Verbs: []string{"patch"}},
		{Groups: []string{"groupsnapshot.storage.k8s.io"}, Resources: []string{"volumegroupsnapshotclasses"}, Verbs: []string{"get", "list", "watch"}},
	},
	"snapshotter-leader-election": {
		{Namespaced: true, Groups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get", "create", "update"}},
	},
	"snapshotter-secrets": {
		{Groups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}},
	},
	"topolvm": {
		{Groups: []string{""}, Resources: []string{"nodes", "persistentvolumes", "persistentvolumeclaims"}, Verbs: []string{"get", "list", "watch"}},
		{Groups: []string{"storage.k8s.io"}, Resources: []string{"csidrivers"}, Verbs: []string{"list", "watch"}},
		{Groups: []string{"topolvm.io"}, Resources: []string{"logicalvolumes"}, Verbs: []string{"get", "list", "watch", "create", "patch", "delete"}},
		{Groups: []string{"topolvm.cybozu.com"}, Resources: []string{"logicalvolumes"}, Verbs: []string{"get", "list", "watch", "create", "patch", "delete"}},
	},
}
