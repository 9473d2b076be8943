{{- define "storage-controller.permissions.resizer-attachments" -}}
# Drivers with PUBLISH_UNPUBLISH_VOLUME that do not expand volumes in use: the expansion waits until the
# volume is detached.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:resizer-attachments
rules:
- apiGroups: ["storage.k8s.io"]
  resources: ["volumeattachments"]
  verbs: ["list", "watch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:resizer-attachments
subjects:
- kind: ServiceAccount
  name: csi-resizer
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:resizer-attachments
  apiGroup: rbac.authorization.k8s.io
{{- end }}
