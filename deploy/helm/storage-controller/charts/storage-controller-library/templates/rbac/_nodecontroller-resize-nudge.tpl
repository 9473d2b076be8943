{{- define "storage-controller.permissions.nodecontroller-resize-nudge" -}}
# --resize-nudge: annotates pods so that their kubelet resizes the file system.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:nodecontroller-resize-nudge
rules:
- apiGroups: [""]
  resources: ["pods"]
  verbs: ["list", "watch", "patch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:nodecontroller-resize-nudge
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:nodecontroller-resize-nudge
  apiGroup: rbac.authorization.k8s.io
{{- end }}
