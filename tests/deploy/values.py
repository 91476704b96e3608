"""Values that the chart must render, and values that it must refuse."""

from typing import Any

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

RENDERED: dict[str, dict[str, Any]] = {
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
            "classes": {"interactive": {"slo": {"tpot_ms": 30}}, "batch": {"enabled": False}},
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
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    },
    "storage": {
        "persistence": {"enabled": True, "storageClass": "fast", "size": "100Gi"},
        "shm": {"enabled": False},
    },
    "long-drain": {"server": {"shutdownTimeout": 120, "port": 9000, "rootPath": "/llm", "requestTimeout": 600}},
    "observed": {
        "server": {"logFormat": "json", "otlpTracesEndpoint": "http://collector.observability:4318/v1/traces"},
        "networkPolicy": {"enabled": True},
        "env": [{"name": "OTEL_TRACES_SAMPLER_ARG", "value": "0.1"}],
    },
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
    "scraped twice": ({"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}, "twice"),
}
