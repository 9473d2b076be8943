{{- define "storage-controller.permissions.capacity-owner" -}}
# The owner of the objects, unless --capacity-ownerref-level is negative. Levels 0 and 1 need
# only the pod.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: storage-controller:capacity-owner
  namespace: default
rules:
- apiGroups: [""]
  resources: ["pods"]
  verbs: ["get"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: storage-controller:capacity-owner
  namespace: default
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default
roleRef:
  kind: Role
  name: storage-controller:capacity-owner
  apiGroup: rbac.authorization.k8s.io
{{- end }}
