{{- define "storage-controller.permissions.capacity" -}}
# Publishing capacity always needs these. Each other directory capacity-* is for one feature.
# "provision --enable-capacity" also needs those of the provisioner; "capacity" alone does not.
# Both use the ServiceAccount of csi-provisioner.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:capacity
rules:
- apiGroups: ["storage.k8s.io"]
  resources: ["storageclasses"]
  verbs: ["list", "watch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:capacity
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:capacity
  apiGroup: rbac.authorization.k8s.io
---
# The objects, in the namespace of the pod (the environment variable NAMESPACE).
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: storage-controller:capacity
  namespace: default
rules:
- apiGroups: ["storage.k8s.io"]
  resources: ["csistoragecapacities"]
  verbs: ["list", "watch", "create", "patch", "delete"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: storage-controller:capacity
  namespace: default
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default
roleRef:
  kind: Role
  name: storage-controller:capacity
  apiGroup: rbac.authorization.k8s.io
{{- end }}
