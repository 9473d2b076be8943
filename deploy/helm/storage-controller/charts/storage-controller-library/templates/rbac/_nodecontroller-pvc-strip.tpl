{{- define "storage-controller.permissions.nodecontroller-pvc-strip" -}}
# --pvc-finalizer-mode=strip, and obsolete finalizers with enforce.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:nodecontroller-pvc-strip
rules:
- apiGroups: [""]
  resources: ["persistentvolumeclaims"]
  verbs: ["patch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:nodecontroller-pvc-strip
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:nodecontroller-pvc-strip
  apiGroup: rbac.authorization.k8s.io
{{- end }}
