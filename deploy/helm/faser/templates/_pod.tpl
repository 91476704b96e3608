{{- /*
The template of a pod. root: the chart's own context. worker: whether it is one of a LeaderWorkerSet that does not
answer HTTP.
*/ -}}
{{- define "faser.pod" -}}
{{- $root := .root }}
{{- $worker := .worker }}
{{- with .root -}}
metadata:
  labels:
    {{- include "faser.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if or .Values.podAnnotations .Values.apiKey.value }}
  annotations:
    {{- with .Values.apiKey.value }}
    checksum/api-key: {{ sha256sum . }}
    {{- end }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  serviceAccountName: {{ include "faser.serviceAccountName" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "faser.gracePeriod" . }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.podSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $fetched := include "faser.fetched" . | fromJsonArray }}
  {{- if or .Values.initContainers $fetched }}
  initContainers:
    {{- with .Values.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- range $fetched }}
    - name: fetch-{{ .name }}
      image: {{ include "faser.image" $root | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [/opt/faser/bin/faser, pull]
      args:
        - {{ .model | quote }}
        {{- with .revision }}
        - --revision={{ . }}
        {{- end }}
      env:
        {{- include "faser.environment" $root | nindent 8 }}
      {{- with $root.Values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with include "faser.fetchResources" $root }}
      resources:
        {{- . | nindent 8 }}
      {{- end }}
      {{- with $root.Values.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- include "faser.mounts" $root | nindent 8 }}
    {{- end }}
  {{- end }}
  containers:
    - name: faser
      image: {{ include "faser.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- if include "faser.ranked" . }}
      # The image's entry point, as a rank. The leader is rank 0.
      command:
        - /opt/faser/bin/torchrun
        - --nnodes={{ .Values.tensorParallel.size }}
        - --nproc-per-node={{ .Values.tensorParallel.ranksPerPod }}
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master-addr=$(LWS_LEADER_ADDRESS)
        - --master-port={{ include "faser.meetingPort" . }}
        # torchrun kills the server after 30 s unless told otherwise; the pod has as long as this after preStop.
        - --shutdown-timeout={{ sub (include "faser.gracePeriod" .) 5 }}
        - --no-python
        - /opt/faser/bin/faser
        - serve
      {{- end }}
      args:
        {{- include "faser.arguments" . | trim | nindent 8 }}
      env:
        - name: TRITON_CACHE_DIR
          value: /data/triton
        - name: FLASHINFER_WORKSPACE_BASE
          value: /data
        {{- with include "faser.apiKeySecret" . }}
        - name: FASER_API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: {{ $root.Values.apiKey.key }}
        {{- end }}
        {{- if .Values.kvEvents.enabled }}
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- end }}
        {{- include "faser.environment" . | nindent 8 }}
      {{- with .Values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if not $worker }}
      ports:
        - name: http
          containerPort: {{ .Values.server.port }}
          protocol: TCP
        {{- range $engine, $port := include "faser.enginePorts" . | fromJsonArray }}
        - name: engine-{{ $engine }}
          containerPort: {{ $port }}
          protocol: TCP
        {{- end }}
        {{- range $engine, $each := include "faser.eventPorts" . | fromJsonArray }}
        {{- $of := include "faser.ofEngine" (dict "root" $root "engine" $engine) }}
        - name: kv-events{{ $of }}
          containerPort: {{ $each.events }}
          protocol: TCP
        - name: kv-replay{{ $of }}
          containerPort: {{ $each.replay }}
          protocol: TCP
        {{- end }}
      startupProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml .Values.startupProbe | nindent 8 }}
      livenessProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml .Values.livenessProbe | nindent 8 }}
      readinessProbe:
        httpGet: {path: /ready, port: http}
        {{- toYaml .Values.readinessProbe | nindent 8 }}
      {{- end }}
      lifecycle:
        preStop:
          exec:
            {{- if $worker }}
            # The leader finishes its answers, with this rank. When it has ended, so does this one.
            command: [sleep, {{ include "faser.drained" . | quote }}]
            {{- else }}
            # The endpoints of the pod leave before it stops to take requests.
            command: [sleep, "5"]
            {{- end }}
      {{- with .Values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- include "faser.mounts" . | nindent 8 }}
        {{- if .Values.shm.enabled }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
        {{- if .Values.model.existingClaim }}
        - name: models
          mountPath: /models
          readOnly: true
        {{- end }}
    {{- with .Values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: cache
      {{- if .Values.persistence.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ .Values.persistence.existingClaim }}
      {{- else if .Values.persistence.enabled }}
      persistentVolumeClaim:
        claimName: {{ include "faser.fullname" . }}
      {{- else if .Values.cacheSizeLimit }}
      emptyDir:
        sizeLimit: {{ .Values.cacheSizeLimit }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: tmp
      emptyDir: {}
    {{- if .Values.shm.enabled }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .Values.shm.sizeLimit }}
    {{- end }}
    {{- if .Values.model.existingClaim }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ .Values.model.existingClaim }}
        readOnly: true
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Variables of the server and of what fetches models. */ -}}
{{- define "faser.environment" -}}
- name: FASER_CACHE_DIR
  value: /data
- name: HOME
  value: /data
- name: HF_HOME
  value: /data/huggingface
{{- with .Values.hfToken }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* What both may write to, and what the values add, such as certificates. */ -}}
{{- define "faser.mounts" -}}
- name: cache
  mountPath: /data
- name: tmp
  mountPath: /tmp
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* The pod's, so that fetching adds nothing to them, without devices such as GPUs. */ -}}
{{- define "faser.fetchResources" -}}
{{- $own := dict -}}
{{- range $kind := list "requests" "limits" -}}
{{- with pick (get $.Values.resources $kind | default dict) "cpu" "memory" "ephemeral-storage" -}}
{{- $_ := set $own $kind . -}}
{{- end -}}
{{- end -}}
{{- with $own -}}{{- toYaml . -}}{{- end -}}
{{- end -}}
