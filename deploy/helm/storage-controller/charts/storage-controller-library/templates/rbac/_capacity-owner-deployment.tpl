{{- define "storage-controller.permissions.capacity-owner-deployment" -}}
# --capacity-ownerref-level=2: finds the Deployment through its ReplicaSet.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: storage-controller:capacity-owner-deployment
  namespace: default
rules:
- apiGroups: ["apps"]
  resources: ["replicasets"]
  verbs: ["get"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: storage-controller:capacity-owner-deployment
  namespace: default
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default
roleRef:
  kind: Role
  name: storage-controller:capacity-owner-deployment
  apiGroup: rbac.authorization.k8s.io
{{- end }}
