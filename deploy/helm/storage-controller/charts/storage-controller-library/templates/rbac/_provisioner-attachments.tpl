{{- define "storage-controller.permissions.provisioner-attachments" -}}
# Drivers with PUBLISH_UNPUBLISH_VOLUME: a volume is not deleted while it is attached.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:provisioner-attachments
rules:
- apiGroups: ["storage.k8s.io"]
  resources: ["volumeattachments"]
  verbs: ["list", "watch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:provisioner-attachments
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:provisioner-attachments
  apiGroup: rbac.authorization.k8s.io
{{- end }}
