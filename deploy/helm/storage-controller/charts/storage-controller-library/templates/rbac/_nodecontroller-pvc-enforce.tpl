{{- define "storage-controller.permissions.nodecontroller-pvc-enforce" -}}
# --pvc-finalizer-mode=enforce, for TopoLVM.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:nodecontroller-pvc-enforce
rules:
- apiGroups: [""]
  resources: ["persistentvolumeclaims"]
  verbs: ["patch"]
- apiGroups: [""]
  resources: ["pods"]
  verbs: ["get", "list", "watch", "delete"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:nodecontroller-pvc-enforce
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:nodecontroller-pvc-enforce
  apiGroup: rbac.authorization.k8s.io
{{- end }}
