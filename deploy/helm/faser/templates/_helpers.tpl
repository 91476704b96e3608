{{- define "faser.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "faser.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "faser.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "faser.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* They can never change: no version, no label from the values. */ -}}
{{- define "faser.selectorLabels" -}}
app.kubernetes.io/name: {{ include "faser.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "faser.labels" -}}
{{ include "faser.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: server
app.kubernetes.io/part-of: faser
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "faser.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "faser.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "faser.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "faser.apiKeySecret" -}}
{{- if .Values.apiKey.existingSecret -}}
{{- .Values.apiKey.existingSecret -}}
{{- else if .Values.apiKey.value -}}
{{- include "faser.fullname" . -}}
{{- end -}}
{{- end -}}

{{- define "faser.autoscaled" -}}
{{- if or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}true{{- end -}}
{{- end -}}

{{- define "faser.gracePeriod" -}}
{{- $needed := add 5 (int (ceil .Values.server.shutdownTimeout)) 10 -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- $needed -}}
{{- else if lt (int .Values.terminationGracePeriodSeconds) (int $needed) -}}
{{- fail (printf "terminationGracePeriodSeconds is %d; with server.shutdownTimeout %v it must be at least %d" (int .Values.terminationGracePeriodSeconds) .Values.server.shutdownTimeout (int $needed)) -}}
{{- else -}}
{{- .Values.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end -}}

{{- /* --speculative-config: the configuration, with classes and SLO in it. */ -}}
{{- define "faser.speculativeConfig" -}}
{{- $config := deepCopy .Values.speculation.config -}}
{{- if .Values.speculation.classes -}}{{- $_ := set $config "classes" .Values.speculation.classes -}}{{- end -}}
{{- if $config -}}{{- toJson $config -}}{{- end -}}
{{- end -}}

{{- define "faser.arguments" -}}
{{- with .Values.model.name }}
- {{ . | quote }}
{{- end }}
{{- with .Values.model.revision }}
- --revision={{ . }}
{{- end }}
{{- with .Values.model.servedNames }}
- --served-model-name
{{- range . }}
- {{ . | quote }}
{{- end }}
{{- end }}
- --host=0.0.0.0
- --port={{ .Values.server.port }}
- --log-level={{ .Values.server.logLevel }}
- --log-format={{ .Values.server.logFormat }}
- --shutdown-timeout={{ .Values.server.shutdownTimeout }}
{{- $flags := dict
  "dtype" .Values.engine.dtype
  "device" .Values.engine.device
  "quantization" .Values.engine.quantization
  "kv-cache-dtype" .Values.engine.kvCacheDtype
  "max-model-len" .Values.engine.maxModelLen
  "max-num-seqs" .Values.engine.maxNumSeqs
  "max-num-batched-tokens" .Values.engine.maxNumBatchedTokens
  "max-num-queued-reqs" .Values.engine.maxNumQueuedReqs
  "kv-cache-memory" .Values.engine.kvCacheMemory
  "gpu-memory-utilization" .Values.engine.gpuMemoryUtilization
  "num-threads" .Values.engine.numThreads
  "engine-timeout" .Values.engine.timeout
  "engine-restarts" .Values.engine.restarts
  "speculative-policy" .Values.speculation.policy
  "slo-ttft-ms" .Values.speculation.slo.ttftMs
  "slo-tpot-ms" .Values.speculation.slo.tpotMs
  "request-timeout" .Values.server.requestTimeout
  "root-path" .Values.server.rootPath
  "otlp-traces-endpoint" .Values.server.otlpTracesEndpoint
-}}
{{- range $name, $value := $flags }}
{{- if not (or (kindIs "invalid" $value) (eq (toString $value) "")) }}
- --{{ $name }}={{ if kindIs "float64" $value }}{{ toJson $value }}{{ else }}{{ $value }}{{ end }}
{{- end }}
{{- end }}
{{- if not .Values.engine.enablePrefixCaching }}
- --no-enable-prefix-caching
{{- end }}
{{- if .Values.server.metricsRequireKey }}
- --metrics-require-key
{{- end }}
{{- if .Values.server.shareCacheAcrossKeys }}
- --share-cache-across-keys
{{- end }}
{{- with include "faser.speculativeConfig" . }}
- {{ printf "--speculative-config=%s" . | quote }}
{{- end }}
{{- range .Values.engine.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- /* What cannot hold together is refused here, in words. */ -}}
{{- define "faser.check" -}}
{{- if and .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}
{{- fail "autoscaling.hpa and autoscaling.keda are both enabled; keep one" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas is %d; it must be at most maxReplicas, %d" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and .Values.apiKey.existingSecret .Values.apiKey.value -}}
{{- fail "apiKey.existingSecret and apiKey.value are both given; keep one" -}}
{{- end -}}
{{- if and .Values.server.metricsRequireKey (not (include "faser.apiKeySecret" .)) -}}
{{- fail "server.metricsRequireKey needs apiKey.existingSecret or apiKey.value" -}}
{{- end -}}
{{- if and .Values.pdb.enabled (not (kindIs "invalid" .Values.pdb.minAvailable)) (not (kindIs "invalid" .Values.pdb.maxUnavailable)) -}}
{{- fail "pdb.minAvailable and pdb.maxUnavailable are both given; set one of them to null" -}}
{{- end -}}
{{- if and .Values.pdb.enabled (kindIs "invalid" .Values.pdb.minAvailable) (kindIs "invalid" .Values.pdb.maxUnavailable) -}}
{{- fail "pdb is enabled without minAvailable and maxUnavailable; give one of them" -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool needs inferencePool.endpointPicker.name, the Service of the endpoint picker" -}}
{{- end -}}
{{- if and .Values.httpRoute.toInferencePool (not .Values.inferencePool.enabled) -}}
{{- fail "httpRoute.toInferencePool needs inferencePool.enabled" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute needs httpRoute.parentRefs, the gateways" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress needs ingress.hosts" -}}
{{- end -}}
{{- if and .Values.model.existingClaim (not .Values.model.name) -}}
{{- fail "model.existingClaim needs model.name, a path below /models" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled .Values.podMonitor.enabled -}}
{{- fail "serviceMonitor and podMonitor are both enabled; every sample would be scraped twice" -}}
{{- end -}}
{{- end -}}
