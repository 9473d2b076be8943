{{- define "storage-controller.permissions.provisioner-topology" -}}
# Drivers with VOLUME_ACCESSIBILITY_CONSTRAINTS; not needed with --node-deployment.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:provisioner-topology
rules:
- apiGroups: [""]
  resources: ["nodes"]
  verbs: ["list", "watch"]
- apiGroups: ["storage.k8s.io"]
  resources: ["csinodes"]
  verbs: ["list", "watch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:provisioner-topology
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:provisioner-topology
  apiGroup: rbac.authorization.k8s.io
{{- end }}
