{{- define "storage-controller.permissions.attacher-secrets" -}}
# StorageClasses with a Secret for controller-publish. If all Secrets are in one namespace, a
# Role and a RoleBinding there are sufficient.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:attacher-secrets
rules:
- apiGroups: [""]
  resources: ["secrets"]
  verbs: ["get"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:attacher-secrets
subjects:
- kind: ServiceAccount
  name: csi-attacher
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:attacher-secrets
  apiGroup: rbac.authorization.k8s.io
{{- end }}
