{{- define "storage-controller.permissions.snapshotter-groups" -}}
# Drivers with CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT: group snapshots. Without these, group
# snapshots are off and snapshots of single volumes work.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:snapshotter-groups
rules:
- apiGroups: ["groupsnapshot.storage.k8s.io"]
  resources: ["volumegroupsnapshotcontents"]
  verbs: ["get", "list", "watch", "patch"]
- apiGroups: ["groupsnapshot.storage.k8s.io"]
  resources: ["volumegroupsnapshotcontents/status"]
  verbs: ["patch"]
- apiGroups: ["groupsnapshot.storage.k8s.io"]
  resources: ["volumegroupsnapshotclasses"]
  verbs: ["get", "list", "watch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:snapshotter-groups
subjects:
- kind: ServiceAccount
  name: csi-snapshotter
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:snapshotter-groups
  apiGroup: rbac.authorization.k8s.io
{{- end }}
