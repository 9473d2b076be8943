{{- define "storage-controller.permissions.nodecontroller" -}}
# The node controller always needs these, to report lost nodes and to serve webhooks. Each other
# directory nodecontroller-* is for one feature. If its permission is missing, the event
# NodeCleanupBlocked names it.
# All writes, except those of the Lease and the records of lost nodes, are patches and deletes.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:nodecontroller
rules:
# get: live reads before deletions, and for new PVCs in webhooks
- apiGroups: [""]
  resources: ["nodes", "persistentvolumes", "persistentvolumeclaims"]
  verbs: ["get", "list", "watch"]
- apiGroups: ["storage.k8s.io"]
  resources: ["storageclasses", "csinodes"]
  verbs: ["get", "list", "watch"]
# opt-out of a namespace
- apiGroups: [""]
  resources: ["namespaces"]
  verbs: ["get"]
# events about all nodes
- apiGroups: ["storage.k8s.io"]
  resources: ["csidrivers"]
  verbs: ["get"]
- apiGroups: [""]
  resources: ["events"]
  verbs: ["create", "patch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:nodecontroller
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: ClusterRole
  name: storage-controller:nodecontroller
  apiGroup: rbac.authorization.k8s.io
---
# The records of lost nodes: ConfigMap lost-nodes.<driver>, in the namespace of the pod. These
# manifests do not know the name of the driver: add resourceNames: ["lost-nodes.<driver>"] to
# the first rule, as the chart does. A resource name cannot limit create.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: storage-controller:nodecontroller
  namespace: default
rules:
- apiGroups: [""]
  resources: ["configmaps"]
  verbs: ["get", "list", "watch", "update"]
- apiGroups: [""]
  resources: ["configmaps"]
  verbs: ["create"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: storage-controller:nodecontroller
  namespace: default
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default
roleRef:
  kind: Role
  name: storage-controller:nodecontroller
  apiGroup: rbac.authorization.k8s.io
{{- end }}
