{{- define "storage-controller.permissions.nodecontroller-custom-resources" -}}
# --node-cleanup-resource. These are the resources of the TopoLVM profiles; the second group is
# that of --profile=topolvm-legacy. Add other resources here.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:nodecontroller-custom-resources
rules:
- apiGroups: ["topolvm.io"]
  resources: ["logicalvolumes"]
  verbs: ["get", "list", "watch", "patch", "delete"]
- apiGroups: ["topolvm.cybozu.com"]
  resources: ["logicalvolumes"]
  verbs: ["get", "list", "watch", "patch", "delete"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:nodecontroller-custom-resources
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:nodecontroller-custom-resources
  apiGroup: rbac.authorization.k8s.io
{{- end }}
