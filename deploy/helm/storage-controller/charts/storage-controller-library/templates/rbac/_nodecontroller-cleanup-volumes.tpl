{{- define "storage-controller.permissions.nodecontroller-cleanup-volumes" -}}
# --node-cleanup=volumes, in addition to nodecontroller-cleanup.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:nodecontroller-cleanup-volumes
rules:
- apiGroups: [""]
  resources: ["persistentvolumes"]
  verbs: ["patch", "delete"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:nodecontroller-cleanup-volumes
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:nodecontroller-cleanup-volumes
  apiGroup: rbac.authorization.k8s.io
{{- end }}
