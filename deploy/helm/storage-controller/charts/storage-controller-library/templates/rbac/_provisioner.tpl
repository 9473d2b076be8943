{{- define "storage-controller.permissions.provisioner" -}}
# The provisioner always needs these. Each other directory provisioner-* is for one feature; the
# provisioner logs missing permissions.
# The names are those of csi-provisioner: applying this replaces its rules.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: external-provisioner-runner
rules:
- apiGroups: [""]
  resources: ["persistentvolumeclaims"]
  verbs: ["get", "list", "watch", "patch"]
# get: live reads before deletions
- apiGroups: [""]
  resources: ["persistentvolumes"]
  verbs: ["get", "list", "watch", "create", "patch", "delete"]
- apiGroups: ["storage.k8s.io"]
  resources: ["storageclasses"]
  verbs: ["list", "watch"]
- apiGroups: [""]
  resources: ["events"]
  verbs: ["create", "patch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: csi-provisioner-role
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: external-provisioner-runner
  apiGroup: rbac.authorization.k8s.io
{{- end }}
