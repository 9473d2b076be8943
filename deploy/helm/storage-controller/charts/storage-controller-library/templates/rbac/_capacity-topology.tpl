{{- define "storage-controller.permissions.capacity-topology" -}}
# Topology segments of all nodes; not needed with --node-deployment.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:capacity-topology
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
  name: storage-controller:capacity-topology
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:capacity-topology
  apiGroup: rbac.authorization.k8s.io
{{- end }}
