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
{{- include "faser.checkTypes" . -}}
{{- include "faser.checkVolume" . -}}
{{- include "faser.checkPorts" . -}}
{{- include "faser.checkEngines" . -}}
{{- if include "faser.ranked" . -}}{{- include "faser.checkRanks" . -}}{{- end -}}
{{- end -}}

{{- /* Types that have kernels on one kind of device only. The torch backend computes them anywhere. */ -}}
{{- define "faser.checkTypes" -}}
{{- $device := .Values.engine.device | trimSuffix (regexFind ":[0-9]+$" .Values.engine.device) -}}
{{- $homes := dict
  "quantization" (dict "fp8" "cuda" "int8" "any" "int4" "any")
  "kvCacheDtype" (dict "fp8" "cuda" "int8" "cpu") -}}
{{- if and (has $device (list "cpu" "cuda")) (not (regexMatch "--backend[= ]torch" (join " " .Values.engine.extraArgs))) -}}
{{- range $name, $home := $homes -}}
{{- $type := get $.Values.engine $name -}}
{{- $needed := get $home $type | default $device -}}
{{- if not (has $needed (list $device "any")) -}}
{{- $allowed := list -}}
{{- range $each, $on := $home -}}{{- if has $on (list $device "any") -}}{{- $allowed = append $allowed $each -}}{{- end -}}{{- end -}}
{{- fail (printf "engine.%s is %s, which needs engine.device %s, and engine.device is %s; use %s, or leave it empty" $name $type $needed $.Values.engine.device (join " or " (sortAlpha $allowed))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A volume of the chart that one node mounts is for one pod at a time. */ -}}
{{- define "faser.checkVolume" -}}
{{- $modes := join ", " .Values.persistence.accessModes -}}
{{- if include "faser.ownVolume" . -}}
{{- if not (regexMatch "ReadWrite" $modes) -}}
{{- fail (printf "persistence.accessModes is %s; pods write models and measured step times there: use ReadWriteOnce, or ReadWriteMany for more than one pod" $modes) -}}
{{- end -}}
{{- end -}}
{{- if include "faser.singlePodVolume" . -}}
{{- $name := "replicaCount" -}}
{{- $pods := int .Values.replicaCount -}}
{{- if include "faser.autoscaled" . -}}
{{- $name = "autoscaling.maxReplicas" -}}
{{- $pods = int .Values.autoscaling.maxReplicas -}}
{{- end -}}
{{- if gt $pods 1 -}}
{{- fail (printf "%s is %d, and persistence.accessModes is %s, a volume that one node can mount: use ReadWriteMany, or turn persistence off (model.existingClaim can hold the model)" $name $pods $modes) -}}
{{- end -}}
{{- $strategy := .Values.strategy | default dict -}}
{{- $rolling := $strategy.rollingUpdate | default dict -}}
{{- $surge := hasKey $rolling "maxSurge" | ternary $rolling.maxSurge "25%" | toString -}}
{{- if and $strategy (ne ($strategy.type | default "") "Recreate") (not (has $surge (list "0" "0%"))) -}}
{{- fail (printf "persistence.accessModes is %s, and with strategy.rollingUpdate.maxSurge %s a new pod waits for the volume of the old one, which waits for it; set strategy.type=Recreate, or leave strategy empty" $modes $surge) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* No two things of a pod listen on one port. */ -}}
{{- define "faser.checkPorts" -}}
{{- $taken := dict (toString .Values.server.port) "server.port" -}}
{{- $ports := list -}}
{{- range $engine, $port := include "faser.enginePorts" . | fromJsonArray -}}
{{- $ports = append $ports (list (printf "the port of engine %d" $engine) $port) -}}
{{- end -}}
{{- range $engine, $each := include "faser.eventPorts" . | fromJsonArray -}}
{{- $of := gt (int $.Values.dataParallel.size) 1 | ternary (printf ", of engine %d," $engine) "" -}}
{{- $ports = append $ports (list (printf "kvEvents.port%s" $of) $each.events) -}}
{{- $ports = append $ports (list (printf "kvEvents.replayPort%s" $of) $each.replay) -}}
{{- end -}}
{{- if include "faser.ranked" . -}}
{{- $ports = append $ports (list "the port where the ranks of tensorParallel meet" (include "faser.meetingPort" .)) -}}
{{- end -}}
{{- range $each := $ports -}}
{{- $name := first $each -}}
{{- $port := last $each | int | toString -}}
{{- if gt (int $port) 65535 -}}
{{- fail (printf "%s is %s; the last port is 65535" $name $port) -}}
{{- end -}}
{{- with get $taken $port -}}
{{- fail (printf "%s and %s are both %s; they need different ports" . $name $port) -}}
{{- end -}}
{{- $_ := set $taken $port $name -}}
{{- end -}}
{{- end -}}

{{- define "faser.checkEngines" -}}
{{- $size := int .Values.dataParallel.size -}}
{{- if not (kindIs "invalid" .Values.dataParallel.firstPort) -}}
{{- if eq $size 1 -}}
{{- fail "dataParallel.firstPort needs dataParallel.size of 2 or more; one engine is reached at server.port" -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (gt $size 8) -}}
{{- fail (printf "an InferencePool has at most 8 ports, and dataParallel.size is %d; without dataParallel.firstPort it has one for all" $size) -}}
{{- end -}}
{{- end -}}
{{- if .Values.kvEvents.enabled -}}
{{- if not .Values.engine.enablePrefixCaching -}}
{{- fail "kvEvents needs engine.enablePrefixCaching; without it there is nothing to tell" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What a model in several pods cannot do. */ -}}
{{- define "faser.checkRanks" -}}
{{- $named := printf "tensorParallel.size is %d" (int .Values.tensorParallel.size) -}}
{{- $strategy := .Values.strategy | default dict -}}
{{- if gt (int .Values.dataParallel.size) 1 -}}
{{- fail (printf "%s, and dataParallel.size is %d; one of them must be 1" $named (int .Values.dataParallel.size)) -}}
{{- end -}}
{{- if hasPrefix "cuda" .Values.engine.device -}}
{{- fail (printf "%s; ranks compute on CPUs only, and engine.device is %s" $named .Values.engine.device) -}}
{{- end -}}
{{- if eq ($strategy.type | default "") "Recreate" -}}
{{- fail (printf "%s; a LeaderWorkerSet knows RollingUpdate only, and strategy.type is Recreate" $named) -}}
{{- end -}}
{{- if include "faser.singlePodVolume" . -}}
{{- fail (printf "%s; every rank mounts the volume, so persistence.accessModes must have ReadWriteMany" $named) -}}
{{- end -}}
{{- $kept := or .Values.persistence.enabled .Values.persistence.existingClaim -}}
{{- if and (include "faser.fetchesModel" .) (not $kept) -}}
{{- fail (printf "%s; every rank needs the files of %s: give model.existingClaim, or persistence that all pods can mount" $named .Values.model.name) -}}
{{- end -}}
{{- end -}}
