{{- define "storage-controller.permissions.provisioner-snapshots" -}}
# Drivers with CREATE_DELETE_SNAPSHOT: restores VolumeSnapshots. Without list and watch, a
# ready snapshot is noticed only by a retry, and orphaned finalizers are not removed. Without
# patch, snapshots are not protected.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:provisioner-snapshots
rules:
- apiGroups: ["snapshot.storage.k8s.io"]
  resources: ["volumesnapshots"]
  verbs: ["get", "list", "watch", "patch"]
- apiGroups: ["snapshot.storage.k8s.io"]
  resources: ["volumesnapshotcontents"]
  verbs: ["get"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:provisioner-snapshots
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:provisioner-snapshots
  apiGroup: rbac.authorization.k8s.io
{{- end }}
