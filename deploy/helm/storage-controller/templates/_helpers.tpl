{{- define "sc.labels" -}}
app.kubernetes.io/name: {{ .Values.name }}
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
{{- if eq $n.unbound "reschedule" }}
- nodecontroller-cleanup-unbound
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
- {{ .name }}-certificates
{{- if eq .certificate "self-signed" }}
- --webhook-config-name
- {{ .name }}s
- --webhook-service
- {{ .name }}
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

{{/* Not empty where the webhooks of the node controller are on. */}}
{{- define "sc.webhooks" -}}
{{- if .Values.nodecontroller.webhooks.enabled }}
{{- if eq .Values.mode "node" }}{{ fail "nodecontroller.webhooks.enabled: mode node has no node controller" }}{{ end }}
{{- if not .Values.nodecontroller.enabled }}{{ fail "nodecontroller.webhooks.enabled: they are those of the node controller, and nodecontroller.enabled is false" }}{{ end -}}
true
{{- end }}
{{- end }}

{{/* The roles that are switched on, and an empty text when all are. */}}
{{- define "sc.roles" -}}
{{- $on := list }}
{{- range $r := list "provisioner" "attacher" "capacity" "nodecontroller" }}
{{- if (index $.Values $r).enabled }}{{ $on = append $on $r }}{{ end }}
{{- end }}
{{- if not $on }}{{ fail "no role is enabled: enable one of provisioner, attacher, capacity, nodecontroller" }}{{ end }}
{{- if lt (len $on) 4 }}{{ join "," $on }}{{ end }}
{{- end }}

{{- define "sc.gates" -}}
{{- if and .Values.provisioner.enabled .Values.provisioner.crossNamespace }}
- --feature-gates=CrossNamespaceVolumeDataSource=true
{{- end }}
{{- end }}

{{/* A container of storage-controller: root, name, port, portName, args, env by name, and webhooks where it serves them. */}}
{{- define "sc.container" -}}
- name: {{ .name }}
  image: {{ printf "%s:%s" .root.Values.image.repository .root.Values.image.tag | quote }}
  {{- with .root.Values.image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  args:
  {{- range .args }}
  - {{ . | quote }}
  {{- end }}
  {{- if not .configured }}
  {{- range .root.Values.extraArgs }}
  - {{ . | quote }}
  {{- end }}
  {{- end }}
  env:
  {{- range .env }}
  - name: {{ .name }}
    valueFrom:
      fieldRef:
        fieldPath: {{ .field }}
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
    periodSeconds: 20
    timeoutSeconds: 5
    failureThreshold: 3
  readinessProbe:
    httpGet:
      path: /readyz
      port: {{ .portName }}
    periodSeconds: 10
    timeoutSeconds: 5
  resources:
    {{- toYaml .root.Values.resources | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: ["ALL"]
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
{{- end }}
