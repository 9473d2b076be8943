{{- define "storage-controller.permissions.provisioner-cross-namespace" -}}
# --feature-gates=CrossNamespaceVolumeDataSource=true. Without watch, a new grant is
# noticed only by a retry.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:provisioner-cross-namespace
rules:
- apiGroups: ["gateway.networking.k8s.io"]
  resources: ["referencegrants"]
  verbs: ["list", "watch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:provisioner-cross-namespace
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:provisioner-cross-namespace
  apiGroup: rbac.authorization.k8s.io
{{- end }}
