{{- define "storage-controller.permissions.nodecontroller-node-finalizer" -}}
# --node-finalizer-mode other than off, and the command remove-finalizers.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:nodecontroller-node-finalizer
rules:
- apiGroups: [""]
  resources: ["nodes"]
  verbs: ["patch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:nodecontroller-node-finalizer
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:nodecontroller-node-finalizer
  apiGroup: rbac.authorization.k8s.io
{{- end }}
