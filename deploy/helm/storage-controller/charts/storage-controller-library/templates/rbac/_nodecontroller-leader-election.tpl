{{- define "storage-controller.permissions.nodecontroller-leader-election" -}}
# --leader-election: the Lease, in the namespace of the pod.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: storage-controller:nodecontroller-leader-election
  namespace: default
rules:
- apiGroups: ["coordination.k8s.io"]
  resources: ["leases"]
  verbs: ["get", "watch", "create", "update"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: storage-controller:nodecontroller-leader-election
  namespace: default
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default
roleRef:
  kind: Role
  name: storage-controller:nodecontroller-leader-election
  apiGroup: rbac.authorization.k8s.io
{{- end }}
