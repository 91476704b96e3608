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

{{- /* Whether several pods hold one model: a LeaderWorkerSet in place of the Deployment. */ -}}
{{- define "faser.ranked" -}}
{{- if gt (int .Values.tensorParallel.size) 1 -}}true{{- end -}}
{{- end -}}

{{- /* The ranks of a model: those of all its pods. */ -}}
{{- define "faser.numRanks" -}}
{{- mul .Values.tensorParallel.size .Values.tensorParallel.ranksPerPod -}}
{{- end -}}

{{- /* The labels of the pods that answer HTTP. */ -}}
{{- define "faser.serverLabels" -}}
{{ include "faser.selectorLabels" . }}
{{- if include "faser.ranked" . }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end -}}

{{- /* The Deployment's name, or the LeaderWorkerSet's: that controller makes a headless Service of the same name, so
it is not the name of the chart's own Service. The names of its pods and revisions are up to 15 characters longer. */ -}}
{{- define "faser.workload" -}}
{{- if include "faser.ranked" . -}}
{{- printf "%s-ranks" (include "faser.fullname" . | trunc 42 | trimSuffix "-") -}}
{{- else -}}
{{- include "faser.fullname" . -}}
{{- end -}}
{{- end -}}

{{- define "faser.scaleTarget" -}}
{{- if include "faser.ranked" . -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "faser.workload" . }}
{{- end -}}

{{- /* Where ranks meet, on the leader. */ -}}
{{- define "faser.meetingPort" -}}29500{{- end -}}

{{- /* The ports of single engines, as JSON. */ -}}
{{- define "faser.enginePorts" -}}
{{- $ports := list -}}
{{- if not (kindIs "invalid" .Values.dataParallel.firstPort) -}}
{{- range $engine := until (int .Values.dataParallel.size) -}}
{{- $ports = append $ports (add $.Values.dataParallel.firstPort $engine) -}}
{{- end -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}

{{- /* Of each engine that tells of its cache: where its events are, and where missed ones, as JSON. The program moves
each engine's ports by its number. */ -}}
{{- define "faser.eventPorts" -}}
{{- $ports := list -}}
{{- if .Values.kvEvents.enabled -}}
{{- range $engine := until (int .Values.dataParallel.size) -}}
{{- $replay := include "faser.replayPort" $ | int -}}
{{- $ports = append $ports (dict "events" (add $.Values.kvEvents.port $engine) "replay" (add $replay $engine)) -}}
{{- end -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}

{{- define "faser.replayPort" -}}
{{- $following := add .Values.kvEvents.port .Values.dataParallel.size -}}
{{- kindIs "invalid" .Values.kvEvents.replayPort | ternary $following .Values.kvEvents.replayPort -}}
{{- end -}}

{{- /* The part of a port's name that tells the engines of a pod apart. */ -}}
{{- define "faser.ofEngine" -}}
{{- if gt (int .root.Values.dataParallel.size) 1 -}}-{{ .engine }}{{- end -}}
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

{{- /* Seconds after which answers have ended. */ -}}
{{- define "faser.drained" -}}
{{- add 5 (int (ceil .Values.server.shutdownTimeout)) -}}
{{- end -}}

{{- define "faser.gracePeriod" -}}
{{- $needed := add (include "faser.drained" .) 10 -}}
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

{{- /* --kv-events-config. Kubernetes puts the pod's address in place of $(POD_IP). */ -}}
{{- define "faser.kvEventsConfig" -}}
{{- $model := first .Values.model.servedNames | default .Values.model.name | default "SmolLM2-135M-Instruct" -}}
{{- dict
  "enable_kv_cache_events" true
  "endpoint" (printf "tcp://*:%d" (int .Values.kvEvents.port))
  "replay_endpoint" (printf "tcp://*:%s" (include "faser.replayPort" .))
  "topic" (.Values.kvEvents.topic | default (printf "kv@$(POD_IP):%v@%s" .Values.server.port $model))
  | toJson -}}
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
{{- if gt (int .Values.dataParallel.size) 1 }}
- --data-parallel-size={{ .Values.dataParallel.size }}
{{- end }}
{{- if not (kindIs "invalid" .Values.dataParallel.firstPort) }}
- --data-parallel-first-port={{ .Values.dataParallel.firstPort }}
{{- end }}
{{- with include "faser.numRanks" . | int }}
{{- if gt . 1 }}
- --tensor-parallel-size={{ . }}
{{- end }}
{{- end }}
{{- if .Values.kvEvents.enabled }}
- {{ include "faser.kvEventsConfig" . | printf "--kv-events-config=%s" | quote }}
{{- end }}
{{- if not .Values.engine.enablePrefixCaching }}
- --no-enable-prefix-caching
{{- end }}
{{- range .Values.server.allowedHosts }}
- {{ printf "--allowed-hosts=%s" . | quote }}
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

{{- /* Whether the model comes from the hub, rather than from the image or a volume. */ -}}
{{- define "faser.fetchesModel" -}}
{{- if not .Values.model.existingClaim -}}{{- include "faser.onHub" .Values.model.name -}}{{- end -}}
{{- end -}}

{{- define "faser.onHub" -}}
{{- $embedded := list "" "smollm2-135m-instruct" "huggingfacetb/smollm2-135m-instruct" -}}
{{- if not (or (hasPrefix "/" .) (has (lower .) $embedded)) -}}true{{- end -}}
{{- end -}}

{{- /* What init containers fetch: a list of name, model and revision, as JSON. */ -}}
{{- define "faser.fetched" -}}
{{- $found := list -}}
{{- if include "faser.fetchesModel" . -}}
{{- $found = append $found (dict "name" "model" "model" .Values.model.name "revision" .Values.model.revision) -}}
{{- end -}}
{{- $draft := .Values.speculation.config -}}
{{- if include "faser.onHub" ($draft.model | default "") -}}
{{- $found = append $found (dict "name" "draft" "model" $draft.model "revision" ($draft.revision | default "")) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- /* The chart's own volume, if it makes one. */ -}}
{{- define "faser.ownVolume" -}}
{{- if and .Values.persistence.enabled (not .Values.persistence.existingClaim) -}}true{{- end -}}
{{- end -}}

{{- define "faser.singlePodVolume" -}}
{{- if and (include "faser.ownVolume" .) (not (has "ReadWriteMany" .Values.persistence.accessModes)) -}}true{{- end -}}
{{- end -}}

{{- define "faser.strategy" -}}
{{- if .Values.strategy -}}
{{- toYaml .Values.strategy -}}
{{- else if include "faser.singlePodVolume" . -}}
type: Recreate
{{- else -}}
type: RollingUpdate
rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
{{- end -}}
{{- end -}}
