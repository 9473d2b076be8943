{{- define "storage-controller.permissions.attacher-leader-election" -}}
# --leader-election: the Lease, in the namespace of the pod.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: storage-controller:attacher-leader-election
  namespace: default
rules:
- apiGroups: ["coordination.k8s.io"]
  resources: ["leases"]
  verbs: ["get", "watch", "create", "update"]
# events on the Lease
- apiGroups: [""]
  resources: ["events"]
  verbs: ["create", "patch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: storage-controller:attacher-leader-election
  namespace: default
subjects:
- kind: ServiceAccount
  name: csi-attacher
  namespace: default
roleRef:
  kind: Role
  name: storage-controller:attacher-leader-election
  apiGroup: rbac.authorization.k8s.io
{{- end }}
