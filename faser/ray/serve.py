"""The application of Ray Serve: a gateway before replicas. `import_path: faser.ray.serve:build`.

deploy/ray/serve.yaml says how many of each there are; what is here are the values that follow from FASER's flags.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from faser.cli.preparation import read_api_keys, read_chat_template
from faser.config.sources import server_settings
from faser.errors import ConfigError
from faser.ray.gateway import Gateway
from faser.ray.replica import Replica, replica_settings

_ROUTER = "faser.ray.router.PrefixRouter"
_MOST_OPEN = 10_000  # requests of one gateway, which only waits


def build(arguments: Mapping[str, Any]) -> Any:
    """The application. arguments: `flags`: those of faser serve, as one text or as a list.

    A replica has at most twice as many requests as it computes at once; more of them wait in the gateway for the
    next replica that has room or is started. Raises ConfigError for what a replica could not be started with.
    """
    if unknown := sorted(arguments.keys() - {"flags"}):
        raise ConfigError(f"args has {unknown[0]}; it must have nothing but flags")
    flags = _flags(arguments.get("flags", ()))
    findings = replica_settings(flags)
    engine_config, server_config = server_settings(findings)
    read_api_keys(server_config, findings.label)
    read_chat_template(server_config.chat_template, findings.label("chat_template"))
    replicas = serve.deployment(Replica).options(
        max_ongoing_requests=2 * engine_config.max_num_seqs,
        graceful_shutdown_timeout_s=server_config.shutdown_timeout,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    )
    gateways = serve.deployment(Gateway).options(
        max_ongoing_requests=_MOST_OPEN,
        graceful_shutdown_timeout_s=server_config.shutdown_timeout,
        ray_actor_options={"num_cpus": 0},
    )
    return gateways.bind(replicas.bind(flags), server_config.max_request_bytes)


def _flags(given: str | Sequence[str]) -> list[str]:
    if isinstance(given, str):
        return shlex.split(given)
    if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        raise ConfigError(f"args.flags is {given!r}; it must be a text or a list of texts; quote numbers")
    return list(given)
