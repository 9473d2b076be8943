{{- define "storage-controller.permissions.resizer-volumeattributesclasses" -}}
# Drivers with MODIFY_VOLUME. Without these, volumes are not modified.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:resizer-volumeattributesclasses
rules:
- apiGroups: ["storage.k8s.io"]
  resources: ["volumeattributesclasses"]
  verbs: ["get", "list", "watch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:resizer-volumeattributesclasses
subjects:
- kind: ServiceAccount
  name: csi-resizer
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:resizer-volumeattributesclasses
  apiGroup: rbac.authorization.k8s.io
{{- end }}
