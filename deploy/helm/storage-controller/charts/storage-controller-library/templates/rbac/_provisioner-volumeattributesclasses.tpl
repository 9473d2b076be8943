{{- define "storage-controller.permissions.provisioner-volumeattributesclasses" -}}
# Drivers with MODIFY_VOLUME. Without list and watch, a new class is noticed only by a
# retry.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:provisioner-volumeattributesclasses
rules:
- apiGroups: ["storage.k8s.io"]
  resources: ["volumeattributesclasses"]
  verbs: ["get", "list", "watch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:provisioner-volumeattributesclasses
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:provisioner-volumeattributesclasses
  apiGroup: rbac.authorization.k8s.io
{{- end }}
