{{/* These templates take a context with the values of the chart storage-controller, Release and Chart. */}}
{{- define "storage-controller.name" -}}
{{ .Values.fullnameOverride | default (.Release.Name | trunc 52 | trimSuffix "-") }}
{{- end }}

{{/* Returns "true" in the mode that serves the driver TopoLVM, otherwise an empty text. */}}
{{- define "storage-controller.topolvm" -}}
{{ if eq .Values.mode "topolvm" }}true{{ end }}
{{- end }}

{{- define "storage-controller.driverName" -}}
{{ if include "storage-controller.topolvm" . }}{{ ternary "topolvm.cybozu.com" "topolvm.io" .Values.useLegacy }}{{ else }}{{ .Values.driver.name }}{{ end }}
{{- end }}

{{/* The directory of the socket. */}}
{{- define "storage-controller.socketDirectory" -}}
{{ ternary "/run/topolvm" "/run/csi" (eq .Values.mode "topolvm") }}
{{- end }}

{{- define "storage-controller.namespace" -}}
{{ get .Values "namespaceOverride" | default .Release.Namespace }}
{{- end }}

{{/* Begins the names of cluster-wide objects and roles, so that those of two releases differ. */}}
{{- define "storage-controller.prefix" -}}
{{ .Values.prefix | default (printf "%s.%s-" (include "storage-controller.namespace" .) (include "storage-controller.name" .)) }}
{{- end }}

{{- define "storage-controller.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "storage-controller.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "storage-controller.webhookName" -}}
{{ .Values.nodecontroller.webhooks.name | default (printf "%s-webhook" (include "storage-controller.name" .)) }}
{{- end }}

{{/* The name of the MutatingWebhookConfiguration. */}}
{{- define "storage-controller.webhookConfiguration" -}}
{{ printf "%s%ss" (include "storage-controller.prefix" .) (include "storage-controller.webhookName" .) | replace ":" "-" }}
{{- end }}

{{/* The labels that select the pods. They must not change: a selector is immutable. */}}
{{- define "storage-controller.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "storage-controller.labels" -}}
{{- $labels := dict "app.kubernetes.io/managed-by" .Release.Service "app.kubernetes.io/version" .Chart.AppVersion }}
{{- $_ := set $labels "app.kubernetes.io/part-of" (include "storage-controller.driverName" .) }}
{{- $_ := set $labels "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") }}
{{- merge (include "storage-controller.selector" . | fromYaml) $labels .Values.commonLabels | toYaml }}
{{- end }}

{{/* Returns "true" if the node controller runs, otherwise an empty text. */}}
{{- define "storage-controller.hasNodecontroller" -}}
{{ if or .Values.nodecontroller.enabled (include "storage-controller.topolvm" .) }}true{{ end }}
{{- end }}

{{/* The modes of the node controller: the values, or those of TopoLVM, or the defaults. */}}
{{- define "storage-controller.modes" -}}
{{- $n := .Values.nodecontroller }}
{{- $topolvm := eq .Values.mode "topolvm" }}
cleanup: {{ $n.nodeCleanup | default (ternary "claims" "report" $topolvm) | quote }}
nodeFinalizer: {{ $n.nodeFinalizerMode | default (ternary "remove" "off" $topolvm) | quote }}
pvcFinalizer: {{ $n.pvcFinalizerMode | default (ternary "strip" "off" $topolvm) | quote }}
{{- end }}

{{/* The values that follow from the capabilities of TopoLVM. */}}
{{- define "storage-controller.topolvmCapabilities" -}}
provisioner: {topology: true, attachments: false, snapshots: true, volumeAttributesClasses: false}
attacher: {enabled: false}
resizer: {volumeAttributesClasses: false, attachments: false, pods: true}
snapshotter: {groups: false}
nodecontroller: {enabled: true, resizeNudge: true}
secrets: {enabled: false}
{{- end }}

{{/* The directories of deploy/rbac that these values need. */}}
{{- define "storage-controller.permissions" -}}
{{- $v := .Values }}
{{- $central := ne $v.mode "node" }}
{{- $topolvm := eq $v.mode "topolvm" }}
{{- if $topolvm }}
{{- $v = mergeOverwrite (deepCopy $v) (include "storage-controller.topolvmCapabilities" . | fromYaml) }}
- topolvm
{{- end }}
{{- if $v.provisioner.enabled }}
- provisioner
{{- if $central }}
- provisioner-leader-election
{{- if $v.provisioner.topology }}
- provisioner-topology
{{- end }}
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
- capacity-topology
{{- if not $v.provisioner.enabled }}
- capacity-leader-election
{{- end }}
{{- end }}
{{- end }}
{{- if and $central $v.nodecontroller.enabled }}
{{- $n := $v.nodecontroller }}
{{- $modes := include "storage-controller.modes" . | fromYaml }}
- nodecontroller
- nodecontroller-leader-election
{{- if $n.resizeNudge }}
- nodecontroller-resize-nudge
{{- end }}
{{- if ne $modes.nodeFinalizer "off" }}
- nodecontroller-node-finalizer
{{- end }}
{{- if has $modes.cleanup (list "claims" "volumes") }}
- nodecontroller-cleanup
{{- end }}
{{- if eq $modes.cleanup "volumes" }}
- nodecontroller-cleanup-volumes
{{- end }}
{{- if eq $modes.pvcFinalizer "strip" }}
- nodecontroller-pvc-strip
{{- end }}
{{- if eq $modes.pvcFinalizer "enforce" }}
- nodecontroller-pvc-enforce
{{- end }}
{{- end }}
{{- if $v.metrics.secure }}
- nodecontroller-secure-metrics
{{- end }}
{{- end }}

{{/* The flags of the node controller that are not at their defaults. */}}
{{- define "storage-controller.nodecontrollerArgs" -}}
{{- $n := .Values.nodecontroller }}
{{- range $flag, $value := dict "node-cleanup" $n.nodeCleanup "node-cleanup-scope" $n.nodeCleanupScope "node-delete-grace" $n.nodeDeleteGrace "node-finalizer-mode" $n.nodeFinalizerMode "node-missing-grace" $n.nodeMissingGrace "pv-release-grace" $n.pvReleaseGrace "pvc-finalizer-mode" $n.pvcFinalizerMode }}
{{- if $value }}
- --{{ $flag }}={{ $value }}
{{- end }}
{{- end }}
{{- if include "storage-controller.webhooks" $ }}
{{- with $n.webhooks }}
- --enable-webhooks
- --cert-dir=/certs
{{- with .clientCA }}
- --webhook-client-ca
- {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Returns "true" if the webhooks of the node controller are enabled, otherwise an empty text.
     The library does not have their Service and configuration. Its context has no Files. */}}
{{- define "storage-controller.webhooks" -}}
{{- if .Values.nodecontroller.webhooks.enabled }}
{{- if not (hasKey . "Files") }}{{ fail "nodecontroller.webhooks.enabled: only the chart storage-controller has webhooks, not the library" }}{{ end }}
{{- if not (include "storage-controller.hasNodecontroller" .) }}{{ fail "nodecontroller.webhooks.enabled: the webhooks belong to the node controller, but nodecontroller.enabled is false" }}{{ end -}}
true
{{- end }}
{{- end }}

{{/* The flag that leaves out roles of mode all-in-one. Of the others, the driver's capabilities decide, unless only one is left. */}}
{{- define "storage-controller.roles" -}}
{{- $on := list }}{{ $off := list }}
{{- range $r := list "provisioner" "attacher" "resizer" "snapshotter" "capacity" "nodecontroller" }}
{{- if (index $.Values $r).enabled }}{{ $on = append $on $r }}{{ else }}{{ $off = append $off (printf "-%s" $r) }}{{ end }}
{{- end }}
{{- if not $on }}{{ fail "no role is enabled: enable one of provisioner, attacher, resizer, snapshotter, capacity, nodecontroller" }}{{ end }}
{{- if eq (len $on) 1 }}--controllers={{ first $on }}
{{- else if and (eq (len $off) 1) (not .Values.nodecontroller.enabled) }}--node-cleanup=off
{{- else if $off }}--controllers={{ join "," $off }}{{ end }}
{{- end }}

{{- define "storage-controller.gates" -}}
{{- if and .Values.provisioner.enabled .Values.provisioner.crossNamespace }}
- --feature-gates=CrossNamespaceVolumeDataSource=true
{{- end }}
{{- end }}

{{/* The port of metrics and probes. */}}
{{- define "storage-controller.httpPort" -}}
{{- $port := get .Values "httpPort" | default 8080 | int }}
{{- if and (ne $port 8080) (ne .Values.mode "node") }}{{ fail "httpPort: only mode node uses it" }}{{ end }}
{{- $port }}
{{- end }}

{{/* The arguments of the container of mode topolvm. */}}
{{- define "storage-controller.topolvmArgs" -}}
{{- $v := .Values }}
{{- $args := list "topolvm" "--leader-election" }}
{{- $off := list }}
{{- range $role := list "snapshotter" "capacity" }}{{ if not (index $v $role).enabled }}{{ $off = append $off (printf "-%s" $role) }}{{ end }}{{ end }}
{{- if $off }}{{ $args = append $args (printf "--controllers=%s" (join "," $off)) }}{{ end }}
{{- if $v.useLegacy }}{{ $args = append $args "--use-legacy" }}{{ end }}
{{- if $v.metrics.secure }}{{ $args = append $args "--secure-metrics-server" }}{{ end }}
{{- concat $args (include "storage-controller.nodecontrollerArgs" . | fromYamlArray) | toYaml }}
{{- end }}

{{/* The arguments of the one container of mode all-in-one. */}}
{{- define "storage-controller.allArgs" -}}
{{- $v := .Values }}
{{- $args := list "all" "--csi-address=/run/csi/csi.sock" "--leader-election" "--http-endpoint=:8080" }}
{{- if $v.capacity.enabled }}{{ $args = append $args "--capacity-ownerref-level=2" }}{{ end }}
{{- with include "storage-controller.roles" . }}{{ $args = append $args . }}{{ end }}
{{- if and $v.nodecontroller.enabled $v.nodecontroller.resizeNudge }}{{ $args = append $args "--resize-nudge" }}{{ end }}
{{- if $v.metrics.secure }}{{ $args = append $args "--secure-metrics-server" }}{{ end }}
{{- if $v.nodecontroller.enabled }}{{ $args = concat $args (include "storage-controller.nodecontrollerArgs" . | fromYamlArray) }}{{ end }}
{{- concat $args (include "storage-controller.gates" . | fromYamlArray) | toYaml }}
{{- end }}

{{/* The configuration file: the settings from the values, overridden by config at the top
     or in a section. */}}
{{- define "storage-controller.configText" -}}
{{- $file := deepCopy .Values.config }}
{{- $below := dict "apiVersion" "config.storage-controller.io/v1alpha1" "kind" "StorageControllerConfiguration" }}
{{- $key := "" }}
{{- range include "storage-controller.allArgs" . | fromYamlArray | rest }}
{{- if not (hasPrefix "--" .) }}{{ $_ := set $below $key . }}
{{- else }}
{{- $parts := splitList "=" (trimPrefix "--" .) }}
{{- $key = first $parts }}
{{- $text := rest $parts | join "=" | default "true" }}
{{- if eq $text "off" }}{{ $_ := set $below $key $text }}{{ else }}{{ $_ := set $below $key (get (fromYaml (printf "value: %s" $text)) "value") }}{{ end }}
{{- end }}
{{- end }}
{{- range $name, $value := $below }}
{{- if or (not (hasKey $file $name)) (kindIs "invalid" (get $file $name)) }}{{ $_ := set $file $name $value }}{{ end }}
{{- end }}
{{- toYaml $file }}
{{- end }}

{{/* The settings in extraArgs and config: their place in the values, flag name and value. */}}
{{- define "storage-controller.settings" -}}
{{- $all := list }}
{{- range $i, $arg := .Values.extraArgs }}
{{- $parts := splitList "=" (regexReplaceAll "^--?" $arg "") }}
{{- $all = append $all (dict "place" (printf "extraArgs: %s" $arg) "name" (replace "_" "-" (first $parts)) "value" (rest $parts | join "=" | default "true")) }}
{{- end }}
{{- range $key, $value := .Values.config }}
{{- if kindIs "map" $value }}
{{- range $inner, $set := $value }}
{{- $all = append $all (dict "place" (printf "config.%s.%s" $key $inner) "name" (printf "%s-%s" $key $inner) "value" (toString $set)) }}
{{- end }}
{{- else }}
{{- $all = append $all (dict "place" (printf "config.%s" $key) "name" $key "value" (toString $value)) }}
{{- end }}
{{- end }}
{{- toYaml $all }}
{{- end }}

{{/* How Prometheus scrapes a port: the fields of an endpoint. The context has root and tokenSecret. */}}
{{- define "storage-controller.scrape" -}}
{{- $endpoint := dict }}
{{- /* extraArgs, which come first, take precedence over config. */}}
{{- range include "storage-controller.settings" .root | fromYamlArray | reverse }}
{{- if eq .name "metrics-path" }}{{ $_ := set $endpoint "path" .value }}{{ end }}
{{- end }}
{{- if .root.Values.metrics.secure }}
{{- $_ := set $endpoint "scheme" "https" }}
{{- $_ := set $endpoint "tlsConfig" (dict "insecureSkipVerify" true) }}
{{- with .tokenSecret }}{{ $_ := set $endpoint "authorization" (dict "credentials" .) }}{{ end }}
{{- end }}
{{- toYaml $endpoint }}
{{- end }}

{{/* The whole seconds of a duration such as 1m30s. */}}
{{- define "storage-controller.seconds" -}}
{{- $minutes := regexFind "[0-9.]+ms?" . }}
{{- $m := hasSuffix "s" $minutes | ternary 0 (trimSuffix "m" $minutes | float64) }}
{{- add (mulf 3600 (regexFind "[0-9.]+h" . | trimSuffix "h" | float64) | int) (mulf 60 $m | int) (regexFind "[0-9.]+s" . | trimSuffix "s" | float64 | int) }}
{{- end }}

{{/* Fails for values that cannot work, but that the API server accepts or refuses without a reason. */}}
{{- define "storage-controller.check" -}}
{{- $v := .Values }}
{{- $node := eq $v.mode "node" }}
{{- $topolvm := eq $v.mode "topolvm" }}
{{- if and $topolvm $v.driver.name }}{{ fail "driver.name: mode topolvm serves topolvm.io, or topolvm.cybozu.com with useLegacy; remove it" }}{{ end }}
{{- if and (eq $v.nodecontroller.pvcFinalizerMode "enforce") (not $topolvm) }}{{ fail "nodecontroller.pvcFinalizerMode: enforce is for mode topolvm only" }}{{ end }}
{{- if and $v.useLegacy (not $topolvm) }}{{ fail "useLegacy: only with mode topolvm" }}{{ end }}
{{- if $topolvm }}
{{- range $role := list "provisioner" "resizer" }}{{ if not (index $v $role).enabled }}{{ fail (printf "%s.enabled: mode topolvm runs this role" $role) }}{{ end }}{{ end }}
{{- else if not $v.driver.name }}{{ fail "driver.name: set it; there is no default" }}{{ end }}
{{- if and $node $v.nodecontroller.enabled }}{{ fail "nodecontroller.enabled: mode node has no node controller" }}{{ end }}
{{- range $key, $value := omit $v.nodecontroller "enabled" "webhooks" }}
{{- if and $value (not (include "storage-controller.hasNodecontroller" $)) }}{{ fail (printf "nodecontroller.%s: nodecontroller.enabled is false" $key) }}{{ end }}
{{- end }}
{{- if and (include "storage-controller.webhooks" .) (not (contains "." (include "storage-controller.driverName" .))) }}{{ fail "nodecontroller.webhooks.enabled: driver.name must contain a dot, because the name of a webhook has three parts" }}{{ end }}
{{- if and $v.config (ne $v.mode "all-in-one") }}{{ fail "config: only with mode all-in-one" }}{{ end }}
{{- range $role := list "provisioner" "attacher" "resizer" "snapshotter" "nodecontroller" }}
{{- if and (index $v $role).resources (ne $v.mode "per-role") }}{{ fail (printf "%s.resources: only with mode per-role; set resources" $role) }}{{ end }}
{{- end }}
{{- if and $v.metrics.secure (not (has $v.mode (list "all-in-one" "topolvm"))) }}{{ fail "metrics.secure: only with mode all-in-one or topolvm" }}{{ end }}
{{- $known := include "storage-controller.configurationKeys" . | splitList "\n" }}
{{- range $key, $value := $v.config }}
{{- if not (has $key $known) }}{{ fail (printf "config.%s: unknown key; docs/flags.md lists the known keys" $key) }}{{ end }}
{{- if and (kindIs "map" $value) (has $key (list "provisioner" "attacher" "resizer" "snapshotter" "capacity" "nodecontroller")) }}
{{- range $inner, $_ := $value }}
{{- if not (has (printf "%s.%s" $key $inner) $known) }}{{ fail (printf "config.%s.%s: unknown key; docs/flags.md lists the known keys" $key $inner) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- $flags := concat (include "storage-controller.configurationKeys" . | replace "." "-" | splitList "\n") (include "storage-controller.moreFlags" . | splitList "\n") }}
{{- range include "storage-controller.settings" . | fromYamlArray }}
{{- if and (hasPrefix "extraArgs" .place) (not (has .name $flags)) }}{{ fail (printf "%s: unknown flag; docs/flags.md lists the flags" .place) }}{{ end }}
{{- end }}
{{- /* Settings that need permissions, by the value that also grants these. */}}
{{- $granted := dict "node-cleanup" "nodecontroller.nodeCleanup" "node-finalizer-mode" "nodecontroller.nodeFinalizerMode" "pvc-finalizer-mode" "nodecontroller.pvcFinalizerMode" "resize-nudge" "nodecontroller.resizeNudge" "enable-webhooks" "nodecontroller.webhooks.enabled" "webhook-client-ca" "nodecontroller.webhooks.clientCA" "enable-capacity" "capacity.enabled" "secure-metrics-server" "metrics.secure" "use-legacy" "useLegacy" "topolvm-use-legacy" "useLegacy" }}
{{- $grace := int $v.terminationGracePeriodSeconds }}
{{- $http := print ":" (include "storage-controller.httpPort" .) }}
{{- if le $grace 25 }}{{ fail (printf "terminationGracePeriodSeconds: %d must exceed --timeout (15 s) plus ten seconds" $grace) }}{{ end }}
{{- $settings := include "storage-controller.settings" . | fromYamlArray }}
{{- $timeouts := list }}
{{- range $settings }}{{ if has .name (list "timeout" "snapshotter-timeout") }}{{ $timeouts = append $timeouts .name }}{{ end }}{{ end }}
{{- if and (not $node) $v.snapshotter.enabled (not $timeouts) (le $grace 70) }}{{ fail (printf "terminationGracePeriodSeconds: %d must exceed the timeout of the snapshotter (one minute) plus ten seconds" $grace) }}{{ end }}
{{- range include "storage-controller.settings" . | fromYamlArray }}
{{- if and (has .name (list "metrics-address" "metrics-bind-address")) (not $topolvm) }}{{ fail (printf "%s: --http-endpoint is set, and they exclude each other" .place) }}{{ end }}
{{- $value := get $granted (regexReplaceAll "^(nodecontroller|capacity)-" .name "") }}
{{- if $value }}{{ fail (printf "%s: the permissions would not match; set %s" .place $value) }}{{ end }}
{{- if and (hasPrefix "feature-gates" (trimPrefix "provisioner-" .name)) (regexMatch "CrossNamespaceVolumeDataSource=true" (printf "%s=%s" .name .value)) (not $v.provisioner.crossNamespace) }}{{ fail (printf "%s: the permissions would not match; set provisioner.crossNamespace" .place) }}{{ end }}
{{- if and (eq (trimPrefix "nodecontroller-" .name) "driver-name") (ne .value (include "storage-controller.driverName" $)) }}{{ fail (printf "%s: the permissions would not match; set driver.name" .place) }}{{ end }}
{{- if eq .name "config" }}{{ fail (printf "%s: the contents of the file belong into config" .place) }}{{ end }}
{{- if and (eq .name "leader-election-namespace") (ne .value (include "storage-controller.namespace" $)) }}{{ fail (printf "%s: the permissions would not match; the Leases are in the namespace of the release" .place) }}{{ end }}
{{- if eq .name "controllers" }}{{ fail (printf "%s: the permissions would not match; set enabled of provisioner, attacher, resizer, snapshotter, capacity and nodecontroller" .place) }}{{ end }}
{{- if and (eq $v.mode "per-role") (hasPrefix "extraArgs" .place) }}
{{- if and (not (has .name $known)) (regexMatch "^(provisioner|attacher|resizer|snapshotter|capacity|nodecontroller)-" .name) }}{{ fail (printf "%s: only mode all-in-one has --%s" .place .name) }}{{ end }}
{{- $name := .name }}
{{- $aliases := dict "resizer.worker-threads" "resizer.workers" "resizer.resync" "resizer.resync-period" }}
{{- $ofRole := false }}
{{- $ofAll := true }}
{{- range list (list "provisioner" "capacity") (list "attacher") (list "resizer") (list "snapshotter") (list "nodecontroller") }}
{{- $runs := false }}
{{- $has := false }}
{{- range . }}
{{- if (index $v .).enabled }}{{ $runs = true }}{{ end }}
{{- $option := printf "%s.%s" . $name }}
{{- if or (has (get $aliases $option | default $option) $known) (and (eq . "provisioner") (eq $name "audit-interval")) }}{{ $has = true }}{{ end }}
{{- end }}
{{- if $has }}{{ $ofRole = true }}{{ else if $runs }}{{ $ofAll = false }}{{ end }}
{{- end }}
{{- if and $ofRole (not $ofAll) }}{{ fail (printf "%s: not every container has --%s; set STORAGE_CONTROLLER_%s in env" .place .name (.name | upper | replace "-" "_")) }}{{ end }}
{{- end }}
{{- if and (eq .name "http-endpoint") (or (eq $v.mode "per-role") (not (has .value (list $http (print "0.0.0.0" $http) (print "[::]" $http))))) }}{{ fail (printf "%s: the probes and ports of the chart have %s" .place (eq $v.mode "per-role" | ternary "8080 to 8084, one per container" (trimPrefix ":" $http))) }}{{ end }}
{{- if and (eq .name "driver-health-endpoint") (eq $v.mode "per-role") }}{{ fail (printf "%s: all containers of the pod would serve this address; use mode all-in-one, or livenessprobe in extraContainers" .place) }}{{ end }}
{{- if and $topolvm (has .name (list "csi-address" "csi-socket" "http-endpoint" "metrics-bind-address" "health-probe-bind-address" "driver-health-endpoint" "cert-dir")) }}{{ fail (printf "%s: mode topolvm sets the addresses and directories of the pod" .place) }}{{ end }}
{{- if eq .name "csi-socket" }}{{ fail (printf "%s: --csi-address is set, and they exclude each other; set csi-address" .place) }}{{ end }}
{{- if and (eq (trimPrefix "nodecontroller-" .name) "webhook-addr") (not (has .value (list ":9443" "0.0.0.0:9443" "[::]:9443"))) }}{{ fail (printf "%s: the ports of the chart have 9443" .place) }}{{ end }}
{{- if and (eq .name "csi-address") (not (hasPrefix "/run/csi/" (trimPrefix "unix://" .value))) }}{{ fail (printf "%s: the socket must be in /run/csi, which the containers share" .place) }}{{ end }}
{{- if and (eq .name "leader-election") (not $node) (has (lower .value) (list "false" "f" "0")) }}{{ fail (printf "%s: several pods would work at the same time, during a rollout even with one replica" .place) }}{{ end }}
{{- if regexMatch "^((provisioner|attacher|resizer|snapshotter|capacity|nodecontroller)-)?((resize|modify)-)?timeout$" .name }}
{{- if le $grace (add 10 (include "storage-controller.seconds" .value | int) | int) }}{{ fail (printf "%s: terminationGracePeriodSeconds, %d, must exceed it by more than ten seconds" .place $grace) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The reference of an image. */}}
{{- define "storage-controller.image" -}}
{{- if not .image.repository }}{{ fail (printf "%s.repository: set it; there is no default" .place) }}{{ end }}
{{- if not (or .image.tag .image.digest) }}{{ fail (printf "%s: set tag or digest" .place) }}{{ end }}
{{- ternary (printf "%s@%s" .image.repository .image.digest) (printf "%s:%s" .image.repository .image.tag) (ne .image.digest "") }}
{{- end }}

{{/* A container of storage-controller: root, name, port, portName, args, env by name, webhooks if it serves them, and the values of its role if it has one.
     In mode topolvm other ports serve liveness, which is that of the driver, and readiness. */}}
{{- define "storage-controller.container" -}}
{{- $topolvm := include "storage-controller.topolvm" .root }}
{{- $http := dict "port" .portName }}
{{- if .root.Values.metrics.secure }}{{ $_ := set $http "scheme" "HTTPS" }}{{ end }}
{{- $liveness := ternary (dict "path" "/healthz" "port" "healthz") (merge (dict "path" "/livez") $http) (ne $topolvm "") }}
{{- $readiness := merge (dict "path" "/readyz") (ternary (dict "port" "readyz") $http (ne $topolvm "")) }}
- name: {{ .name }}
  image: {{ include "storage-controller.image" (dict "place" "image" "image" .root.Values.image) | quote }}
  {{- with .root.Values.image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  args:
  {{- range .args }}
  - {{ . | quote }}
  {{- end }}
  {{- with get .root.Values "verbosity" | toString | trimPrefix "<nil>" }}
  - {{ printf "--v=%s" . | quote }}
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
  {{- with .root.Values.envFrom }}
  envFrom:
  {{- toYaml . | nindent 2 }}
  {{- end }}
  ports:
  - name: {{ .portName }}
    containerPort: {{ .port }}
  {{- if $topolvm }}
  - name: readyz
    containerPort: 8081
  - name: healthz
    containerPort: 9808
  {{- end }}
  {{- if .webhooks }}
  - name: webhook
    containerPort: 9443
  {{- end }}
  {{- with .root.Values.startupProbe }}
  startupProbe:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  livenessProbe:
    httpGet:
      {{- toYaml $liveness | nindent 6 }}
    {{- merge (dict) .root.Values.livenessProbe (dict "periodSeconds" 20 "timeoutSeconds" 5 "failureThreshold" 3) | toYaml | nindent 4 }}
  readinessProbe:
    httpGet:
      {{- toYaml $readiness | nindent 6 }}
    {{- merge (dict) .root.Values.readinessProbe (dict "periodSeconds" 10 "timeoutSeconds" 5) | toYaml | nindent 4 }}
  resources:
    {{- get (get . "role" | default dict) "resources" | default .root.Values.resources | toYaml | nindent 4 }}
  securityContext:
    {{- toYaml .root.Values.securityContext | nindent 4 }}
  volumeMounts:
  {{- if .webhooks }}
  - name: certificate
    mountPath: /certs
    readOnly: true
  {{- end }}
  {{- if .configured }}
  - name: configuration
    mountPath: /etc/storage-controller
    readOnly: true
  {{- end }}
  - name: socket
    mountPath: {{ include "storage-controller.socketDirectory" .root }}
  - name: kube-api-access
    mountPath: /var/run/secrets/kubernetes.io/serviceaccount
    readOnly: true
  {{- with .root.Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The containers of storage-controller, in the order of their names in mode per-role. */}}
{{- define "storage-controller.containers" -}}
{{- include "storage-controller.check" . }}
{{- $v := .Values }}
{{- $node := eq $v.mode "node" }}
{{- $configured := and $v.config (eq $v.mode "all-in-one") }}
{{- $holder := dict "name" "POD_NAME" "field" "metadata.name" }}
{{- $leases := dict "name" "POD_NAMESPACE" "field" "metadata.namespace" }}
{{- $objects := dict "name" "NAMESPACE" "field" "metadata.namespace" }}
{{- $here := dict "name" "NODE_NAME" "field" "spec.nodeName" }}
{{- $gates := include "storage-controller.gates" . | fromYamlArray }}
{{- $nodeArgs := include "storage-controller.nodecontrollerArgs" . | fromYamlArray }}
{{- $capacity := list }}
{{- if $v.capacity.enabled }}{{ $capacity = list "--enable-capacity" (printf "--capacity-ownerref-level=%d" (ternary 1 2 $node)) }}{{ end }}
{{- if $node }}
{{- if not $v.provisioner.enabled }}{{ fail "provisioner.enabled: mode node is that of the provisioner" }}{{ end }}
{{- $args := concat (list "provision" "--csi-address=/run/csi/csi.sock" "--node-deployment" (printf "--http-endpoint=:%s" (include "storage-controller.httpPort" .))) $capacity $gates }}
{{- include "storage-controller.container" (dict "root" . "name" "storage-controller" "port" (include "storage-controller.httpPort" . | int) "portName" "http" "args" $args "env" (list $here $holder $leases $objects) "configured" false "webhooks" "") | nindent 0 }}
{{- else if eq $v.mode "topolvm" }}
{{- $args := include "storage-controller.topolvmArgs" . | fromYamlArray }}
{{- include "storage-controller.container" (dict "root" . "name" "storage-controller" "port" 8080 "portName" "http" "args" $args "env" (list $holder $leases $objects) "configured" false "webhooks" (include "storage-controller.webhooks" .)) | nindent 0 }}
{{- else if eq $v.mode "all-in-one" }}
{{- $args := include "storage-controller.allArgs" . | fromYamlArray }}
{{- if $configured }}{{ $args = list "all" "--config=/etc/storage-controller/config.yaml" }}{{ end }}
{{- include "storage-controller.container" (dict "root" . "name" "storage-controller" "port" 8080 "portName" "http" "args" $args "env" (list $holder $leases $objects) "configured" $configured "webhooks" (include "storage-controller.webhooks" .)) | nindent 0 }}
{{- else }}
{{- if $v.nodecontroller.enabled }}
{{- $args := concat (list "nodecontroller" "--csi-address=/run/csi/csi.sock" "--leader-election" "--http-endpoint=:8082") $nodeArgs }}
{{- if not $v.nodecontroller.resizeNudge }}{{ $args = append $args "--resize-nudge=false" }}{{ end }}
{{- include "storage-controller.container" (dict "root" . "name" "nodecontroller" "port" 8082 "portName" "http-nodes" "args" $args "env" (list $holder $leases) "configured" false "webhooks" (include "storage-controller.webhooks" .) "role" $v.nodecontroller) | nindent 0 }}
{{- end }}
{{- if $v.attacher.enabled }}
{{- $args := list "attach" "--csi-address=/run/csi/csi.sock" "--leader-election" "--http-endpoint=:8081" }}
{{- include "storage-controller.container" (dict "root" . "name" "attacher" "port" 8081 "portName" "http-attach" "args" $args "env" (list $holder $leases) "configured" false "webhooks" "" "role" $v.attacher) | nindent 0 }}
{{- end }}
{{- range $role, $c := dict "resizer" (dict "command" "resize" "port" 8083) "snapshotter" (dict "command" "snapshot" "port" 8084) }}
{{- if (index $v $role).enabled }}
{{- $args := list $c.command "--csi-address=/run/csi/csi.sock" "--leader-election" (printf "--http-endpoint=:%d" $c.port) }}
{{- include "storage-controller.container" (dict "root" $ "name" $role "port" $c.port "portName" (printf "http-%s" $c.command) "args" $args "env" (list $holder $leases) "configured" false "webhooks" "" "role" (index $v $role)) | nindent 0 }}
{{- end }}
{{- end }}
{{- if or $v.provisioner.enabled $v.capacity.enabled }}
{{- $args := concat (list "provision" "--csi-address=/run/csi/csi.sock" "--leader-election" "--http-endpoint=:8080") $capacity $gates }}
{{- if not $v.provisioner.enabled }}{{ $args = list "capacity" "--csi-address=/run/csi/csi.sock" "--leader-election" "--http-endpoint=:8080" "--capacity-ownerref-level=2" }}{{ end }}
{{- include "storage-controller.container" (dict "root" . "name" "provisioner" "port" 8080 "portName" "http-provision" "args" $args "env" (list $holder $leases $objects) "configured" false "webhooks" "" "role" $v.provisioner) | nindent 0 }}
{{- end }}
{{- end }}
{{- end }}

{{/* The volumes that these containers mount, except "socket". */}}
{{- define "storage-controller.volumes" -}}
{{- if and .Values.config (eq .Values.mode "all-in-one") }}
- name: configuration
  configMap:
    name: {{ include "storage-controller.configName" . }}
{{- end }}
{{- if include "storage-controller.webhooks" . }}
- name: certificate
  secret:
    secretName: {{ include "storage-controller.webhookName" . }}-certificates
{{- end }}
- name: kube-api-access
  projected:
    defaultMode: 0444
    sources:
    - serviceAccountToken:
        path: token
        expirationSeconds: 3607
    - configMap:
        name: kube-root-ca.crt
        items:
        - key: ca.crt
          path: ca.crt
    - downwardAPI:
        items:
        - path: namespace
          fieldRef:
            fieldPath: metadata.namespace
{{- end }}

{{- define "storage-controller.configName" -}}
{{ include "storage-controller.name" . }}-configuration
{{- end }}

{{/* The ConfigMap with the configuration file. Its name is stable, so that a previous ReplicaSet finds it. */}}
{{- define "storage-controller.configMap" -}}
{{- if .Values.config }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "storage-controller.configName" . }}
  namespace: {{ include "storage-controller.namespace" . }}
  labels:
    {{- include "storage-controller.labels" . | nindent 4 }}
data:
  config.yaml: |
    {{- include "storage-controller.configText" . | nindent 4 }}
{{- end }}
{{- end }}
