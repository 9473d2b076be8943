{{- define "storage-controller.permissions.topolvm" -}}
# The CSI service and the node cleanup of the command topolvm. The second group is that of --use-legacy.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:topolvm
rules:
- apiGroups: [""]
  resources: ["nodes", "persistentvolumes", "persistentvolumeclaims"]
  verbs: ["get", "list", "watch"]
- apiGroups: ["storage.k8s.io"]
  resources: ["csidrivers"]
  verbs: ["list", "watch"]
- apiGroups: ["topolvm.io"]
  resources: ["logicalvolumes"]
  verbs: ["get", "list", "watch", "create", "patch", "delete"]
- apiGroups: ["topolvm.cybozu.com"]
  resources: ["logicalvolumes"]
  verbs: ["get", "list", "watch", "create", "patch", "delete"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:topolvm
subjects:
- kind: ServiceAccount
  name: storage-controller-topolvm
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:topolvm
  apiGroup: rbac.authorization.k8s.io
{{- end }}
