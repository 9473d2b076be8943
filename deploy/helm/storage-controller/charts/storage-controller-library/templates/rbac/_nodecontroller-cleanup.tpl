{{- define "storage-controller.permissions.nodecontroller-cleanup" -}}
# --node-cleanup=claims or volumes
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:nodecontroller-cleanup
rules:
- apiGroups: [""]
  resources: ["persistentvolumeclaims"]
  verbs: ["delete"]
# used PVCs and attached volumes are kept
- apiGroups: [""]
  resources: ["pods"]
  verbs: ["list", "watch"]
- apiGroups: ["storage.k8s.io"]
  resources: ["volumeattachments"]
  verbs: ["list", "watch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:nodecontroller-cleanup
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:nodecontroller-cleanup
  apiGroup: rbac.authorization.k8s.io
{{- end }}
