{{- define "storage-controller.permissions.resizer-secrets" -}}
# StorageClasses with a Secret for controller-expand or controller-modify. If all Secrets are in one
# namespace, a Role and a RoleBinding there are sufficient.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:resizer-secrets
rules:
- apiGroups: [""]
  resources: ["secrets"]
  verbs: ["get"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:resizer-secrets
subjects:
- kind: ServiceAccount
  name: csi-resizer
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:resizer-secrets
  apiGroup: rbac.authorization.k8s.io
{{- end }}
