{{- define "sc.name" -}}
{{ .Values.name | default (.Release.Name | trunc 52 | trimSuffix "-") }}
{{- end }}

{{/* Begins the names of cluster-wide objects and roles, so that those of two releases differ. */}}
{{- define "sc.prefix" -}}
{{ .Values.prefix | default (printf "%s-%s-" .Release.Namespace (include "sc.name" .)) }}
{{- end }}

{{- define "sc.webhookName" -}}
{{ .Values.nodecontroller.webhooks.name | default (printf "%s-webhook" (include "sc.name" .)) }}
{{- end }}

{{/* The name of the MutatingWebhookConfiguration. */}}
{{- define "sc.webhookConfiguration" -}}
{{ printf "%s%ss" (include "sc.prefix" .) (include "sc.webhookName" .) }}
{{- end }}

{{/* The labels that select the pods. */}}
{{- define "sc.selector" -}}
app.kubernetes.io/name: {{ include "sc.name" . }}
{{- end }}

{{- define "sc.labels" -}}
{{ include "sc.selector" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The directories of deploy/rbac that these values need. */}}
{{- define "sc.permissions" -}}
{{- $v := .Values }}
{{- $central := ne $v.mode "node" }}
{{- if $v.provisioner.enabled }}
- provisioner
{{- if $central }}
- provisioner-leader-election
{{- if $v.provisioner.topology }}
- provisioner-topology
{{- end }}
{{- if $v.provisioner.attachments }}
- provisioner-attachments
{{- end }}
{{- if $v.provisioner.snapshots }}
- provisioner-snapshots
{{- end }}
{{- if $v.provisioner.volumeAttributesClasses }}
- provisioner-volumeattributesclasses
{{- end }}
{{- end }}
{{- if $v.provisioner.crossNamespace }}
- provisioner-cross-namespace
{{- end }}
{{- if $v.secrets.enabled }}
- provisioner-secrets
{{- end }}
{{- end }}
{{- if and $central $v.attacher.enabled }}
- attacher
- attacher-leader-election
{{- if $v.secrets.enabled }}
- attacher-secrets
{{- end }}
{{- end }}
{{- if and $central $v.resizer.enabled }}
- resizer
- resizer-leader-election
{{- if $v.resizer.volumeAttributesClasses }}
- resizer-volumeattributesclasses
{{- end }}
{{- if $v.resizer.attachments }}
- resizer-attachments
{{- end }}
{{- if $v.resizer.pods }}
- resizer-pods
{{- end }}
{{- if $v.secrets.enabled }}
- resizer-secrets
{{- end }}
{{- end }}
{{- if and $central $v.snapshotter.enabled }}
- snapshotter
- snapshotter-leader-election
{{- if $v.snapshotter.groups }}
- snapshotter-groups
{{- end }}
{{- if $v.secrets.enabled }}
- snapshotter-secrets
{{- end }}
{{- end }}
{{- if $v.capacity.enabled }}
- capacity
- capacity-owner
{{- if $central }}
- capacity-owner-deployment
{{- if $v.provisioner.topology }}
- capacity-topology
{{- end }}
{{- if not $v.provisioner.enabled }}
- capacity-leader-election
{{- end }}
{{- end }}
{{- end }}
{{- if and $central $v.nodecontroller.enabled }}
{{- $n := $v.nodecontroller }}
- nodecontroller
- nodecontroller-leader-election
{{- if $n.resizeNudge }}
- nodecontroller-resize-nudge
{{- end }}
{{- if ne $n.nodeFinalizerMode "off" }}
- nodecontroller-node-finalizer
{{- end }}
{{- if has $n.nodeCleanup (list "dry-run" "claims" "volumes") }}
- nodecontroller-cleanup
{{- end }}
{{- if eq $n.nodeCleanup "volumes" }}
- nodecontroller-cleanup-volumes
{{- end }}
{{- if eq $n.pvcFinalizerMode "strip" }}
- nodecontroller-pvc-strip
{{- end }}
{{- if eq $n.pvcFinalizerMode "enforce" }}
- nodecontroller-pvc-enforce
{{- end }}
{{- if $n.customResources }}
- nodecontroller-custom-resources
{{- end }}
{{- if $n.webhooks.enabled }}
- nodecontroller-webhook-certificates
{{- end }}
{{- end }}
{{- if $v.monitoring.secure }}
- nodecontroller-secure-metrics
{{- end }}
{{- end }}

{{/* The flags of the node controller that are not at their defaults. */}}
{{- define "sc.nodecontrollerArgs" -}}
{{- $n := .Values.nodecontroller }}
{{- if ne $n.nodeFinalizerMode "off" }}
- --node-finalizer-mode={{ $n.nodeFinalizerMode }}
{{- end }}
{{- if ne $n.nodeCleanup "report" }}
- --node-cleanup={{ $n.nodeCleanup }}
{{- end }}
{{- if ne $n.unbound "ignore" }}
- --node-cleanup-unbound={{ $n.unbound }}
{{- end }}
{{- with $n.webhooks }}
{{- if .enabled }}
- --enable-webhooks
- --webhook-cert-mode={{ .certificate }}
- --webhook-cert-secret
- {{ printf "%s-certificates" (include "sc.webhookName" $) | quote }}
{{- if eq .certificate "self-signed" }}
- --webhook-config-name
- {{ include "sc.webhookConfiguration" $ | quote }}
- --webhook-service
- {{ include "sc.webhookName" $ | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- if ne $n.pvcFinalizerMode "off" }}
- --pvc-finalizer-mode={{ $n.pvcFinalizerMode }}
{{- end }}
{{- if not $n.resizeNudge }}
- --resize-nudge=false
{{- end }}
{{- end }}

{{/* Returns "true" if the webhooks of the node controller are enabled, otherwise an empty text. */}}
{{- define "sc.webhooks" -}}
{{- if .Values.nodecontroller.webhooks.enabled }}
{{- if eq .Values.mode "node" }}{{ fail "nodecontroller.webhooks.enabled: mode node has no node controller" }}{{ end }}
{{- if not .Values.nodecontroller.enabled }}{{ fail "nodecontroller.webhooks.enabled: the webhooks belong to the node controller, but nodecontroller.enabled is false" }}{{ end -}}
true
{{- end }}
{{- end }}

{{/* Returns the enabled roles, or an empty text if all are enabled. */}}
{{- define "sc.roles" -}}
{{- $on := list }}
{{- range $r := list "provisioner" "attacher" "resizer" "snapshotter" "capacity" "nodecontroller" }}
{{- if (index $.Values $r).enabled }}{{ $on = append $on $r }}{{ end }}
{{- end }}
{{- if not $on }}{{ fail "no role is enabled: enable one of provisioner, attacher, resizer, snapshotter, capacity, nodecontroller" }}{{ end }}
{{- if lt (len $on) 6 }}{{ join "," $on }}{{ end }}
{{- end }}

{{- define "sc.gates" -}}
{{- if and .Values.provisioner.enabled .Values.provisioner.crossNamespace }}
- --feature-gates=CrossNamespaceVolumeDataSource=true
{{- end }}
{{- end }}

{{/* The arguments of the one container of mode all-in-one. */}}
{{- define "sc.allArgs" -}}
{{- $v := .Values }}
{{- $args := list "all" "--csi-address=/run/csi/csi.sock" "--leader-election" "--http-endpoint=:8080" }}
{{- with include "sc.roles" . }}{{ $args = append $args (printf "--controllers=%s" .) }}{{ end }}
{{- if $v.capacity.enabled }}{{ $args = append $args "--capacity-ownerref-level=2" }}{{ end }}
{{- /* off in "all" by default */}}
{{- if and $v.nodecontroller.enabled $v.nodecontroller.resizeNudge }}{{ $args = append $args "--resize-nudge" }}{{ end }}
{{- if $v.monitoring.secure }}{{ $args = append $args "--secure-metrics-server" }}{{ end }}
{{- if $v.nodecontroller.enabled }}{{ $args = concat $args (include "sc.nodecontrollerArgs" . | fromYamlArray) }}{{ end }}
{{- concat $args (include "sc.gates" . | fromYamlArray) | toYaml }}
{{- end }}

{{/* The configuration file: the settings from the values, overridden by configuration at the top
     or in a section. */}}
{{- define "sc.configText" -}}
{{- $file := deepCopy .Values.configuration }}
{{- $below := dict "apiVersion" "config.storage-controller.io/v1alpha1" "kind" "StorageControllerConfiguration" }}
{{- $key := "" }}
{{- range include "sc.allArgs" . | fromYamlArray | rest }}
{{- if not (hasPrefix "--" .) }}{{ $_ := set $below $key . }}
{{- else }}
{{- $parts := splitList "=" (trimPrefix "--" .) }}
{{- $key = first $parts }}
{{- $_ := set $below $key (get (fromYaml (printf "value: %s" (rest $parts | join "=" | default "true"))) "value") }}
{{- end }}
{{- end }}
{{- range $name, $value := $below }}
{{- if or (not (hasKey $file $name)) (kindIs "invalid" (get $file $name)) }}{{ $_ := set $file $name $value }}{{ end }}
{{- end }}
{{- toYaml $file }}
{{- end }}

{{/* The settings in extraArgs and configuration: their place in the values, flag name and value. */}}
{{- define "sc.settings" -}}
{{- $all := list }}
{{- range $i, $arg := .Values.extraArgs }}
{{- $parts := splitList "=" (regexReplaceAll "^--?" $arg "") }}
{{- $all = append $all (dict "place" (printf "extraArgs: %s" $arg) "name" (replace "_" "-" (first $parts)) "value" (rest $parts | join "=" | default "true")) }}
{{- end }}
{{- range $key, $value := .Values.configuration }}
{{- if kindIs "map" $value }}
{{- range $inner, $set := $value }}
{{- $all = append $all (dict "place" (printf "configuration.%s.%s" $key $inner) "name" (printf "%s-%s" $key $inner) "value" (toString $set)) }}
{{- end }}
{{- else }}
{{- $all = append $all (dict "place" (printf "configuration.%s" $key) "name" $key "value" (toString $value)) }}
{{- end }}
{{- end }}
{{- toYaml $all }}
{{- end }}

{{/* The whole seconds of a duration such as 1m30s. */}}
{{- define "sc.seconds" -}}
{{- $minutes := regexFind "[0-9]+ms?" . }}
{{- $m := hasSuffix "s" $minutes | ternary 0 (trimSuffix "m" $minutes | int) }}
{{- add (mul 3600 (regexFind "[0-9]+h" . | trimSuffix "h" | int)) (mul 60 $m) (regexFind "[0-9.]+s" . | trimSuffix "s" | float64 | int) }}
{{- end }}

{{/* Fails for values that cannot work, but that the API server accepts or refuses without a reason. */}}
{{- define "sc.check" -}}
{{- $v := .Values }}
{{- $node := eq $v.mode "node" }}
{{- range list "name" "image" }}{{ if not (get $v.driver .) }}{{ fail (printf "driver.%s: set it; there is no default" .) }}{{ end }}{{ end }}
{{- if and $v.configuration (ne $v.mode "all-in-one") }}{{ fail "configuration: only with mode all-in-one" }}{{ end }}
{{- if and $v.monitoring.secure (ne $v.mode "all-in-one") }}{{ fail "monitoring.secure: only with mode all-in-one" }}{{ end }}
{{- $known := .Files.Lines "files/configuration-keys.txt" }}
{{- range $key, $value := $v.configuration }}
{{- if not (has $key $known) }}{{ fail (printf "configuration.%s: unknown key; docs/flags.md lists the known keys" $key) }}{{ end }}
{{- if and (kindIs "map" $value) (has $key (list "provisioner" "attacher" "resizer" "snapshotter" "capacity" "nodecontroller")) }}
{{- range $inner, $_ := $value }}
{{- if not (has (printf "%s.%s" $key $inner) $known) }}{{ fail (printf "configuration.%s.%s: unknown key; docs/flags.md lists the known keys" $key $inner) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- /* Settings that need permissions, by the value that also grants these. */}}
{{- $granted := dict "node-cleanup" "nodecontroller.nodeCleanup" "node-cleanup-unbound" "nodecontroller.unbound" "node-finalizer-mode" "nodecontroller.nodeFinalizerMode" "pvc-finalizer-mode" "nodecontroller.pvcFinalizerMode" "resize-nudge" "nodecontroller.resizeNudge" "enable-webhooks" "nodecontroller.webhooks.enabled" "webhook-cert-mode" "nodecontroller.webhooks.certificate" "enable-capacity" "capacity.enabled" "secure-metrics-server" "monitoring.secure" }}
{{- $grace := int $v.terminationGracePeriodSeconds }}
{{- if le $grace 25 }}{{ fail (printf "terminationGracePeriodSeconds: %d must exceed --timeout (15 s) plus ten seconds" $grace) }}{{ end }}
{{- $settings := include "sc.settings" . | fromYamlArray }}
{{- $timeouts := list }}
{{- range $settings }}{{ if has .name (list "timeout" "snapshotter-timeout") }}{{ $timeouts = append $timeouts .name }}{{ end }}{{ end }}
{{- if and (not $node) $v.snapshotter.enabled (not $timeouts) (le $grace 70) }}{{ fail (printf "terminationGracePeriodSeconds: %d must exceed the timeout of the snapshotter (one minute) plus ten seconds" $grace) }}{{ end }}
{{- range include "sc.settings" . | fromYamlArray }}
{{- if has .name (list "metrics-address" "metrics-bind-address") }}{{ fail (printf "%s: --http-endpoint is set, and they exclude each other" .place) }}{{ end }}
{{- $value := get $granted (regexReplaceAll "^(nodecontroller|capacity)-" .name "") }}
{{- if $value }}{{ fail (printf "%s: the permissions would not match; set %s" .place $value) }}{{ end }}
{{- if and (eq (trimPrefix "nodecontroller-" .name) "node-cleanup-resource") (not $v.nodecontroller.customResources) }}{{ fail (printf "%s: the permissions would not match; set nodecontroller.customResources" .place) }}{{ end }}
{{- if eq (trimPrefix "nodecontroller-" .name) "profile" }}{{ fail (printf "%s: the permissions would not match; set the values of nodecontroller" .place) }}{{ end }}
{{- if and (hasPrefix "feature-gates" (trimPrefix "provisioner-" .name)) (regexMatch "CrossNamespaceVolumeDataSource=true" (printf "%s=%s" .name .value)) (not $v.provisioner.crossNamespace) }}{{ fail (printf "%s: the permissions would not match; set provisioner.crossNamespace" .place) }}{{ end }}
{{- if eq .name "config" }}{{ fail (printf "%s: the contents of the file belong into configuration" .place) }}{{ end }}
{{- if eq .name "controllers" }}{{ fail (printf "%s: the permissions would not match; set enabled of provisioner, attacher, resizer, snapshotter, capacity and nodecontroller" .place) }}{{ end }}
{{- if and (eq .name "http-endpoint") (or (eq $v.mode "per-role") (not (hasSuffix ":8080" .value))) }}{{ fail (printf "%s: the probes and ports of the chart have %s" .place (eq $v.mode "per-role" | ternary "8080 to 8084, one per container" "8080")) }}{{ end }}
{{- if and (eq .name "driver-health-endpoint") (eq $v.mode "per-role") }}{{ fail (printf "%s: all containers of the pod would serve this address; use mode all-in-one, or livenessprobe in extraContainers" .place) }}{{ end }}
{{- if and (has .name (list "csi-address" "csi-socket")) (not (hasPrefix "/run/csi/" (trimPrefix "unix://" .value))) }}{{ fail (printf "%s: the socket must be in /run/csi, which the containers share" .place) }}{{ end }}
{{- if and (eq .name "leader-election") (not $node) (has (lower .value) (list "false" "f" "0")) }}{{ fail (printf "%s: several pods would work at the same time, during a rollout even with one replica" .place) }}{{ end }}
{{- if regexMatch "^((provisioner|attacher|resizer|snapshotter|capacity|nodecontroller)-)?timeout$" .name }}
{{- if le $grace (add 10 (include "sc.seconds" .value | int) | int) }}{{ fail (printf "%s: terminationGracePeriodSeconds, %d, must exceed it by more than ten seconds" .place $grace) }}{{ end }}
{{- end }}
{{- end }}
{{- range $i, $volume := $v.volumes }}
{{- if has (get $volume "name") (list "socket" "kube-api-access" "configuration") }}{{ fail (printf "volumes[%d]: the chart has a volume %s already" $i $volume.name) }}{{ end }}
{{- end }}
{{- range $i, $container := $v.extraContainers }}
{{- if has (get $container "name") (list "driver" "storage-controller" "provisioner" "attacher" "resizer" "snapshotter" "nodecontroller") }}{{ fail (printf "extraContainers[%d]: the chart has a container %s already" $i $container.name) }}{{ end }}
{{- end }}
{{- end }}

{{/* A container of storage-controller: root, name, port, portName, args, env by name, and webhooks if it serves them. */}}
{{- define "sc.container" -}}
{{- $image := .root.Values.image }}
{{- $tag := $image.tag | default .root.Chart.AppVersion }}
- name: {{ .name }}
  image: {{ ternary (printf "%s@%s" $image.repository $image.digest) (printf "%s:%s" $image.repository $tag) (ne $image.digest "") | quote }}
  {{- with .root.Values.image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  args:
  {{- range .args }}
  - {{ . | quote }}
  {{- end }}
  {{- range .root.Values.extraArgs }}
  - {{ . | quote }}
  {{- end }}
  env:
  {{- range .env }}
  - name: {{ .name }}
    valueFrom:
      fieldRef:
        fieldPath: {{ .field }}
  {{- end }}
  {{- with .root.Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  ports:
  - name: {{ .portName }}
    containerPort: {{ .port }}
  {{- if .webhooks }}
  - name: webhook
    containerPort: 9443
  {{- end }}
  livenessProbe:
    httpGet:
      path: /livez
      port: {{ .portName }}
      {{- if .root.Values.monitoring.secure }}
      scheme: HTTPS
      {{- end }}
    periodSeconds: 20
    timeoutSeconds: 5
    failureThreshold: 3
  readinessProbe:
    httpGet:
      path: /readyz
      port: {{ .portName }}
      {{- if .root.Values.monitoring.secure }}
      scheme: HTTPS
      {{- end }}
    periodSeconds: 10
    timeoutSeconds: 5
  resources:
    {{- toYaml .root.Values.resources | nindent 4 }}
  securityContext:
    {{- toYaml .root.Values.securityContext | nindent 4 }}
  volumeMounts:
  {{- if .configured }}
  - name: configuration
    mountPath: /etc/storage-controller
    readOnly: true
  {{- end }}
  - name: socket
    mountPath: /run/csi
  - name: kube-api-access
    mountPath: /var/run/secrets/kubernetes.io/serviceaccount
    readOnly: true
  {{- with .root.Values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
