{{- define "storage-controller.permissions.nodecontroller-webhook-certificates" -}}
# --webhook-cert-mode=self-signed: the Secret of --webhook-cert-secret, in its namespace,
# and the configuration of --webhook-config-name. A resource name cannot limit
# create; to avoid that rule, remove it and create an empty Secret. With
# --webhook-cert-mode=secret only the verb get on the Secret is needed.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: storage-controller-webhook-certificates
  namespace: default # namespace of the Secret
rules:
- apiGroups: [""]
  resources: ["secrets"]
  resourceNames: ["storage-controller-webhook-certificates"]
  verbs: ["get", "update"]
- apiGroups: [""]
  resources: ["secrets"]
  verbs: ["create"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: storage-controller-webhook-certificates
  namespace: default
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default # namespace of the ServiceAccount
roleRef:
  kind: Role
  name: storage-controller-webhook-certificates
  apiGroup: rbac.authorization.k8s.io
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: storage-controller:nodecontroller-webhook-certificates
rules:
- apiGroups: ["admissionregistration.k8s.io"]
  resources: ["mutatingwebhookconfigurations"]
  resourceNames: ["storage-controller-webhooks"]
  verbs: ["get", "patch"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: storage-controller:nodecontroller-webhook-certificates
subjects:
- kind: ServiceAccount
  name: storage-controller-nodecontroller
  namespace: default
roleRef:
  kind: ClusterRole
  name: storage-controller:nodecontroller-webhook-certificates
  apiGroup: rbac.authorization.k8s.io
{{- end }}
