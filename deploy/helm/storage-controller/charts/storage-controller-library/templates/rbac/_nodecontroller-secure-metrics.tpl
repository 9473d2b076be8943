{{- define "storage-controller.permissions.nodecontroller-secure-metrics" -}}
# --secure-metrics-server: authenticates and authorizes readers of metrics.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:nodecontroller-secure-metrics
rules:
- apiGroups: ["authentication.k8s.io"]
  resources: ["tokenreviews"]
  verbs: ["create"]
- apiGroups: ["authorization.k8s.io"]
  resources: ["subjectaccessreviews"]
  verbs: ["create"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:nodecontroller-secure-metrics
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:nodecontroller-secure-metrics
  apiGroup: rbac.authorization.k8s.io
{{- end }}
