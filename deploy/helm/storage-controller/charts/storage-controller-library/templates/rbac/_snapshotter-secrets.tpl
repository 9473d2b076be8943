{{- define "storage-controller.permissions.snapshotter-secrets" -}}
# VolumeSnapshotClasses with Secrets. If all Secrets are in one namespace, a Role and a
# RoleBinding there are sufficient.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:snapshotter-secrets
rules:
- apiGroups: [""]
  resources: ["secrets"]
  verbs: ["get"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:snapshotter-secrets
subjects:
- kind: ServiceAccount
  name: csi-snapshotter
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:snapshotter-secrets
  apiGroup: rbac.authorization.k8s.io
{{- end }}
