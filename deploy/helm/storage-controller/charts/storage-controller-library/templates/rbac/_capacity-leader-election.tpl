{{- define "storage-controller.permissions.capacity-leader-election" -}}
# --leader-election without the provisioner: the Lease and its events, in the namespace of the
# pod.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: storage-controller:capacity-leader-election
  namespace: default
rules:
- apiGroups: ["coordination.k8s.io"]
  resources: ["leases"]
  verbs: ["get", "watch", "create", "update"]
- apiGroups: [""]
  resources: ["events"]
  verbs: ["create", "patch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: storage-controller:capacity-leader-election
  namespace: default
subjects:
- kind: ServiceAccount
  name: csi-provisioner
  namespace: default
roleRef:
  kind: Role
  name: storage-controller:capacity-leader-election
  apiGroup: rbac.authorization.k8s.io
{{- end }}
