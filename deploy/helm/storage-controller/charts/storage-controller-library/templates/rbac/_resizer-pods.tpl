{{- define "storage-controller.permissions.resizer-pods" -}}
# Drivers without PUBLISH_UNPUBLISH_VOLUME that do not expand volumes in use: the expansion waits until no
# pod uses the volume. The pods are watched from the first such expansion.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:resizer-pods
rules:
- apiGroups: [""]
  resources: ["pods"]
  verbs: ["list", "watch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:resizer-pods
subjects:
- kind: ServiceAccount
  name: csi-resizer
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:resizer-pods
  apiGroup: rbac.authorization.k8s.io
{{- end }}
