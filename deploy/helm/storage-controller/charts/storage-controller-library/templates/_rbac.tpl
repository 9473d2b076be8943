{{/* The Roles and ClusterRoles that the values need, and their bindings to the ServiceAccount. */}}
{{- define "storage-controller.rbac" -}}
{{- $v := .Values }}
{{- if $v.rbac.create }}
{{- range $name := include "storage-controller.permissions" . | fromYamlArray }}
{{- range $text := splitList "\n---\n" (include (printf "storage-controller.permissions.%s" $name) $) }}
{{- $o := fromYaml $text }}
{{- $places := list "" }}
{{- /* The first rule is for the ConfigMap of lost nodes, whose name the manifests do not know. */}}
{{- if and (eq $name "nodecontroller") (eq $o.kind "Role") }}
{{- $_ := set (first $o.rules) "resourceNames" (list (printf "lost-nodes.%s" (include "storage-controller.driverName" $ | lower))) }}
{{- end }}
{{- $meta := $o.metadata }}
{{- $_ := set $meta "name" (print (include "storage-controller.prefix" $) $meta.name) }}
{{- $_ := set $meta "labels" (include "storage-controller.labels" $ | fromYaml) }}
{{- if hasKey $meta "namespace" }}{{ $_ := set $meta "namespace" (include "storage-controller.namespace" $) }}{{ end }}
{{- if hasKey $o "subjects" }}
{{- $_ := set $o "subjects" (list (dict "kind" "ServiceAccount" "name" (include "storage-controller.serviceAccount" $) "namespace" (include "storage-controller.namespace" $))) }}
{{- $_ := set $o.roleRef "name" (print (include "storage-controller.prefix" $) $o.roleRef.name) }}
{{- end }}
{{- if and (hasSuffix "-secrets" $name) (eq $o.kind "ClusterRoleBinding") (not $v.secrets.cluster) }}
{{- $_ := set $o "kind" "RoleBinding" }}
{{- $places = prepend $v.secrets.namespaces (include "storage-controller.namespace" $) | uniq }}
{{- end }}
{{- range $place := $places }}
{{- if $place }}{{ $_ := set $meta "namespace" $place }}{{ end }}
---
{{ toYaml $o }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
