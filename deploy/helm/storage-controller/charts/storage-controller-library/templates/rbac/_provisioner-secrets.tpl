{{- define "storage-controller.permissions.provisioner-secrets" -}}
# StorageClasses with Secrets. If all Secrets are in one namespace, a Role and a RoleBinding
# there are sufficient; see also --secret-namespaces.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:provisioner-secrets
rules:
- apiGroups: [""]
  resources: ["secrets"]
  verbs: ["get"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:provisioner-secrets
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:provisioner-secrets
  apiGroup: rbac.authorization.k8s.io
{{- end }}
