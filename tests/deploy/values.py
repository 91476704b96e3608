"""Values that the chart must render, and values that it must refuse."""

from typing import Any

import yaml

from tests.deploy.exported import DEPLOY

SECRET = {"apiKey": {"existingSecret": "keys"}}
CLAIM = {"model": {"existingClaim": "models", "name": "/models/qwen3-8b", "servedNames": ["qwen", "default"]}}
GPU = {
    "engine": {
        "device": "cuda",
        "dtype": "bfloat16",
        "gpuMemoryUtilization": 0.9,
        "maxNumSeqs": 256,
        "extraArgs": ["--enforce-eager"],
    },
    "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "32Gi"}, "requests": {"cpu": "4"}},
    "runtimeClassName": "nvidia",
    "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
}

PICKER = {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}}
ENGINES = {"dataParallel": {"size": 4, "firstPort": 8100}, **PICKER}
RANKS = {"tensorParallel": {"size": 3}}
VOLUME = {"persistence": {"enabled": True}}
SHARED = {"persistence": {"enabled": True, "accessModes": ["ReadWriteMany"]}}
HUB = {"model": {"name": "Qwen/Qwen3-8B"}}
EXAMPLES: dict[str, dict[str, Any]] = {
    f"values/{path.name}": yaml.safe_load(path.read_text())
    for path in sorted((DEPLOY / "helm" / "values").iterdir())
}

RENDERED: dict[str, dict[str, Any]] = {
    **EXAMPLES,
    "defaults": {},
    "gpu": GPU,
    "claim": CLAIM,
    "named": {
        "nameOverride": "llm",
        "fullnameOverride": "chat",
        "commonLabels": {"team": "ml"},
        "podLabels": {"a": "b"},
    },
    "digest": {"image": {"repository": "registry.example/faser", "digest": "sha256:" + "a" * 64}},
    "secrets": {
        **SECRET,
        "hfToken": {"existingSecret": "hub"},
        "server": {"metricsRequireKey": True},
        "serviceMonitor": {"enabled": True},
    },
    "key-in-values": {"apiKey": {"value": "one,two"}},
    "speculation": {
        "speculation": {
            "policy": "faser",
            "config": {"method": "ngram", "num_speculative_tokens": 4},
            "classes": {
                "interactive": {"slo": {"tpot_ms": 30}, "admission": "refuse"},
                "batch": {"enabled": False},
            },
            "slo": {"ttftMs": 500, "tpotMs": 50.5},
        }
    },
    "hpa": {"autoscaling": {"hpa": {"enabled": True}, "minReplicas": 2, "maxReplicas": 6}},
    "keda": {"autoscaling": {"keda": {"enabled": True}, "minReplicas": 2}},
    "three-pods": {"replicaCount": 3, "pdb": {"minAvailable": None, "maxUnavailable": "50%"}},
    "monitoring": {
        "podMonitor": {"enabled": True, "labels": {"release": "p"}},
        "prometheusRule": {"enabled": True},
        "grafanaDashboard": {"enabled": True},
    },
    "network": {
        "networkPolicy": {
            "enabled": True,
            "from": [{"podSelector": {"matchLabels": {"app": "gateway"}}}],
            "allowModelDownload": False,
        }
    },
    "ingress": {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": [{"host": "llm.example"}],
            "tls": [{"secretName": "t", "hosts": ["llm.example"]}],
        }
    },
    "gateway": {
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "gw", "namespace": "infra"}],
            "hostnames": ["llm.example"],
            "toInferencePool": True,
        },
        **PICKER,
    },
    "storage": {
        "persistence": {"enabled": True, "storageClass": "fast", "size": "100Gi"},
        "shm": {"enabled": False},
    },
    "pods of a shared volume": {**SHARED, **HUB, "replicaCount": 3},
    "pods of a claim": {"replicaCount": 3, "persistence": {"enabled": True, "existingClaim": "shared"}},
    "one scaled pod of a volume": {**VOLUME, "autoscaling": {"hpa": {"enabled": True}, "maxReplicas": 1}},
    "hub models": {
        "model": {"name": "Qwen/Qwen3-8B", "revision": "v1"},
        "speculation": {"config": {"method": "draft_model", "model": "Qwen/Qwen3-0.6B", "revision": "v2"}},
        "hfToken": {"existingSecret": "hub"},
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "envFrom": [{"secretRef": {"name": "proxy"}}],
        "extraVolumes": [{"name": "certificates", "configMap": {"name": "certificates"}}],
        "extraVolumeMounts": [{"name": "certificates", "mountPath": "/etc/ssl/certs"}],
        "initContainers": [{"name": "first", "image": "busybox:1"}],
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "32Gi"}},
    },
    "thresholds": {
        "prometheusRule": {
            "enabled": True,
            "thresholds": {"ttftSeconds": 1, "tpotSeconds": 0.05, "queueSeconds": 30},
        }
    },
    "long-drain": {"server": {"shutdownTimeout": 120, "port": 9000, "rootPath": "/llm", "requestTimeout": 600}},
    "own-names": {"server": {"allowedHosts": ["llm.example", "*.corp.example"]}},
    "no-names": {"server": {"allowedHosts": []}},
    "observed": {
        "server": {"logFormat": "json", "otlpTracesEndpoint": "http://collector.observability:4318/v1/traces"},
        "networkPolicy": {"enabled": True},
        "env": [{"name": "OTEL_TRACES_SAMPLER_ARG", "value": "0.1"}],
    },
    "engines": {**ENGINES, "networkPolicy": {"enabled": True}},
    "engines behind one port": {"dataParallel": {"size": 16}, **PICKER},
    "kv-events": {"kvEvents": {"enabled": True}},
    "kv-events of engines": {**ENGINES, "kvEvents": {"enabled": True}, "networkPolicy": {"enabled": True}},
    "kv-events for one router": {
        **CLAIM,
        "kvEvents": {"enabled": True, "port": 6000, "replayPort": 6001, "topic": "kv@$(POD_IP)@all"},
        "networkPolicy": {
            "enabled": True,
            "from": [{"podSelector": {"matchLabels": {"app": "gateway"}}}],
            "kvEventsFrom": [{"podSelector": {"matchLabels": {"app": "picker"}}}],
        },
    },
    "ranks": {
        **RANKS,
        **PICKER,
        **SECRET,
        "replicaCount": 2,
        "server": {"shutdownTimeout": 90.5},
        "kvEvents": {"enabled": True},
        "networkPolicy": {"enabled": True, "allowModelDownload": False},
        "podMonitor": {"enabled": True},
        "podAnnotations": {"a": "b"},
    },
    "ranks of a claim": {
        **RANKS,
        **CLAIM,
        "strategy": {"type": "RollingUpdate"},
        "serviceMonitor": {"enabled": True},
    },
    "ranks of a hub model": {
        **RANKS,
        **HUB,
        **SHARED,
        "fullnameOverride": "a" * 63,
    },
    "ranks with hpa": {**RANKS, "autoscaling": {"hpa": {"enabled": True}, "minReplicas": 2}},
    "ranks with keda": {**RANKS, "autoscaling": {"keda": {"enabled": True}}},
    "extras": {
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "{{ .Release.Name }}-x"},
                "data": {"a": "b"},
            }
        ],
        "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
        "extraVolumes": [{"name": "x", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "x", "mountPath": "/x"}],
        "initContainers": [{"name": "i", "image": "busybox:1"}],
    },
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"replicas": 3}, "replicas"),
    "unknown key below": ({"model": {"nam": "x"}}, "nam"),
    "tag latest": ({"image": {"tag": "latest"}}, "/image/tag"),
    "bad digest": ({"image": {"digest": "sha256:12"}}, "/image/digest"),
    "port": ({"server": {"port": 70000}}, "/server/port"),
    "log format": ({"server": {"logFormat": "xml"}}, "/server/logFormat"),
    "traces without a path": ({"server": {"otlpTracesEndpoint": "http://c:4318"}}, "/server/otlpTracesEndpoint"),
    "replicas": ({"replicaCount": -1}, "/replicaCount"),
    "dtype": ({"engine": {"dtype": "int4"}}, "/engine/dtype"),
    "weights": ({"engine": {"quantization": "int3"}}, "/engine/quantization"),
    "kv type": ({"engine": {"kvCacheDtype": "int4"}}, "/engine/kvCacheDtype"),
    "fp8 on a CPU": (
        {"engine": {"device": "cpu", "quantization": "fp8"}},
        "engine.quantization is fp8, which needs engine.device cuda, and engine.device is cpu; use int4 or int8",
    ),
    "int8 keys on a GPU": (
        {"engine": {"device": "cuda", "kvCacheDtype": "int8"}},
        "engine.kvCacheDtype is int8, which needs engine.device cpu, and engine.device is cuda; use fp8, or leave",
    ),
    "fp8 keys on a CPU": (
        {"engine": {"device": "cpu", "kvCacheDtype": "fp8"}},
        "engine.kvCacheDtype is fp8, which needs engine.device cuda, and engine.device is cpu; use int8, or leave",
    ),
    "pods of one volume": (
        {**VOLUME, "replicaCount": 3},
        "replicaCount is 3, and persistence.accessModes is ReadWriteOnce, a volume that one node can mount: use",
    ),
    "scaled pods of one volume": (
        {
            "persistence": {"enabled": True, "accessModes": ["ReadWriteOncePod"]},
            "autoscaling": {"keda": {"enabled": True}},
        },
        "autoscaling.maxReplicas is 4, and persistence.accessModes is ReadWriteOncePod",
    ),
    "volume without a writer": (
        {"persistence": {"enabled": True, "accessModes": ["ReadOnlyMany"]}},
        "persistence.accessModes is ReadOnlyMany; pods write models and measured step times there",
    ),
    "surge beside one volume": (
        {**VOLUME, "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}},
        "with strategy.rollingUpdate.maxSurge 1 a new pod waits for the volume of the old one",
    ),
    "Kubernetes' own surge beside one volume": (
        {**VOLUME, "strategy": {"type": "RollingUpdate", "rollingUpdate": None}},
        "with strategy.rollingUpdate.maxSurge 25% a new pod waits",
    ),
    "threshold between buckets": (
        {"prometheusRule": {"thresholds": {"ttftSeconds": 3}}},
        "'/prometheusRule/thresholds/ttftSeconds': value must be one of 0.001,",
    ),
    "share over one": ({"prometheusRule": {"thresholds": {"kvCacheUsage": 95}}}, "/thresholds/kvCacheUsage"),
    "unknown threshold": ({"prometheusRule": {"thresholds": {"ttftMs": 900}}}, "ttftMs"),
    "policy": ({"speculation": {"policy": "always"}}, "/speculation/policy"),
    "utilization": ({"engine": {"gpuMemoryUtilization": 1.5}}, "/engine/gpuMemoryUtilization"),
    "kv size": ({"engine": {"kvCacheMemory": "much"}}, "/engine/kvCacheMemory"),
    "class key": ({"speculation": {"classes": {"a": {"slo": {"tpot": 3}}}}}, "tpot"),
    "two scalers": ({"autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True}}}, "keep one"),
    "replica range": ({"autoscaling": {"hpa": {"enabled": True}, "minReplicas": 5}}, "maxReplicas, 4"),
    "both limits": ({"pdb": {"maxUnavailable": 1}}, "pdb.minAvailable and pdb.maxUnavailable"),
    "no limit": ({"pdb": {"minAvailable": None}}, "give one of them"),
    "two keys": ({"apiKey": {"existingSecret": "a", "value": "b"}}, "keep one"),
    "metrics key": ({"server": {"metricsRequireKey": True}}, "needs apiKey"),
    "short grace": ({"terminationGracePeriodSeconds": 30}, "at least 40"),
    "interval": ({"serviceMonitor": {"enabled": True, "interval": "15 seconds"}}, "/serviceMonitor/interval"),
    "keda number": ({"autoscaling": {"keda": {"enabled": True, "queueThreshold": 5}}}, "queueThreshold"),
    "no picker": ({"inferencePool": {"enabled": True}}, "endpointPicker.name"),
    "no pool": (
        {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}], "toInferencePool": True}},
        "inferencePool.enabled",
    ),
    "no gateway": ({"httpRoute": {"enabled": True}}, "parentRefs"),
    "no hosts": ({"ingress": {"enabled": True}}, "ingress.hosts"),
    "claim without a path": ({"model": {"existingClaim": "c"}}, "model.name"),
    "no engines": ({"dataParallel": {"size": 0}}, "/dataParallel/size"),
    "port of one engine": ({"dataParallel": {"firstPort": 8100}}, "needs dataParallel.size of 2 or more"),
    "engine at the server's port": (
        {"dataParallel": {"size": 4, "firstPort": 7997}},
        "server.port and the port of engine 3 are both 8000",
    ),
    "engine at the first port": (
        {"dataParallel": {"size": 4, "firstPort": 8000}},
        "server.port and the port of engine 0 are both 8000",
    ),
    "ports end": (
        {"dataParallel": {"size": 4, "firstPort": 65533}},
        "the port of engine 3 is 65536; the last port is 65535",
    ),
    "large pool": ({**PICKER, "dataParallel": {"size": 9, "firstPort": 8100}}, "at most 8 ports"),
    "events of one engine where another's are asked for": (
        {"dataParallel": {"size": 2}, "kvEvents": {"enabled": True, "port": 5557, "replayPort": 5558}},
        "kvEvents.replayPort, of engine 0, and kvEvents.port, of engine 1, are both 5558",
    ),
    "events at an engine's port": (
        {"dataParallel": {"size": 2, "firstPort": 8100}, "kvEvents": {"enabled": True, "replayPort": 8101}},
        "the port of engine 1 and kvEvents.replayPort, of engine 0, are both 8101",
    ),
    "events past the last port": (
        {"dataParallel": {"size": 3}, "kvEvents": {"enabled": True, "port": 65534}},
        "kvEvents.replayPort, of engine 0, is 65537; the last port is 65535",
    ),
    "events of no cache": (
        {"engine": {"enablePrefixCaching": False}, "kvEvents": {"enabled": True}},
        "kvEvents needs engine.enablePrefixCaching",
    ),
    "events at the server's port": (
        {"kvEvents": {"enabled": True, "replayPort": 8000}},
        "server.port and kvEvents.replayPort are both 8000",
    ),
    "events at one port": (
        {"kvEvents": {"enabled": True, "replayPort": 5557}},
        "kvEvents.port and kvEvents.replayPort are both 5557",
    ),
    "ranks and engines": ({**RANKS, "dataParallel": {"size": 2}}, "one of them must be 1"),
    "ranks on GPUs": ({**RANKS, "engine": {"device": "cuda"}}, "ranks compute on CPUs only"),
    "ranks replaced at once": ({**RANKS, "strategy": {"type": "Recreate"}}, "strategy.type is Recreate"),
    "ranks meet at the server's port": ({**RANKS, "server": {"port": 29500}}, "are both 29500"),
    "ranks without files": ({**RANKS, "model": {"name": "Qwen/Qwen3-8B"}}, "every rank needs the files of Qwen"),
    "ranks with a volume of one": ({**RANKS, "persistence": {"enabled": True}}, "must have ReadWriteMany"),
    "scraped twice": ({"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}, "twice"),
}
