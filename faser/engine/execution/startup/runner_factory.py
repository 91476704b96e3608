"""Makes the runner of a model: eager or with CUDA graphs, and with the token sampler of its device."""

from collections.abc import Sequence
from enum import Enum

from faser.config.engine import EngineConfig
from faser.engine.execution.cuda_graphs.batch_sizes import DraftGraphs, GraphSizes
from faser.engine.execution.cuda_graphs.graph_runner import GraphRunner
from faser.engine.execution.drafters.draft_samplers import WINDOW
from faser.engine.execution.drafters.layer_skip import draft_layers
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.tokens import DeviceTokenSampler, HostTokenSampler, TokenSampler
from faser.engine.execution.startup.model_loading import LoadedModel
from faser.engine.execution.startup.sizing import most_logit_rows
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.processors import LANE_BYTES, DeviceLane
from faser.kernels.interface.shapes import KvShape
from faser.types import ProgressCallback


class ModelRole(Enum):
    TARGET = "target"
    DRAFTER = "draft model"


def make_runner(
    config: EngineConfig,
    backend: Backend,
    model: LoadedModel,
    kv: KvShape,
    role: ModelRole,
    progress: ProgressCallback,
    device_lanes: Sequence[DeviceLane] = (),
) -> Runner:
    """With CUDA graphs where the device can replay them and the config does not forbid it.

    device_lanes: those that it computes on while another model's runner computes on the rest of the device.
    """
    decoder, capture = model.decoder, backend.graph_capture
    most = max_logit_rows(config, role)
    kernels = backend.device_sampling_kernels(most, decoder.spec.vocab_size)
    if capture is None or kernels is None:
        sampler: TokenSampler = HostTokenSampler(backend.sampling_kernels or TorchSamplingKernels())
        return Runner(decoder, backend, kv, sampler)
    device_sampler = DeviceTokenSampler(kernels, capture, backend.device, most)
    if not config.records_steps:
        return Runner(decoder, backend, kv, device_sampler)
    return GraphRunner(
        decoder,
        backend,
        kv,
        device_sampler,
        capture,
        sizes=_sizes(config, model, role),
        max_logit_rows=most,
        drafts=_draft_graphs(config, decoder.spec.num_layers, role),
        lane_captures={
            each: lane for each in device_lanes if (lane := backend.graph_capture_on(each)) is not None
        },
        report=lambda stage, done, total: progress(f"{stage} of the {role.value}", done, total),
    )


def max_logit_rows(config: EngineConfig, role: ModelRole) -> int:
    """Most rows of one step that need logits."""
    return most_logit_rows(config) if role is ModelRole.TARGET else config.max_num_seqs


def expected_graph_bytes(
    config: EngineConfig, model: LoadedModel, role: ModelRole, num_device_lanes: int = 0
) -> int:
    """About the device memory of the model's CUDA graphs, those for device lanes included."""
    if not config.records_steps:
        return num_device_lanes * LANE_BYTES
    spec, sizes = model.decoder.spec, _sizes(config, model, role)
    depths = dict.fromkeys((None, *_draft_graphs(config, spec.num_layers, role).depths))
    num_kinds = len(set(spec.windows))
    graph_bytes = sizes.expected_bytes(num_kinds, len(depths))
    return graph_bytes + num_device_lanes * (graph_bytes + LANE_BYTES)


def _sizes(config: EngineConfig, model: LoadedModel, role: ModelRole) -> GraphSizes:
    drafts = 0 if config.speculation.policy == "off" else config.speculation.cap
    return GraphSizes.default(
        max_rows=config.max_num_batched_tokens,
        max_sequences=config.max_num_seqs,
        # A draft's first pass also stores the tokens that followed the last draft: a row or two per sequence.
        max_drafts=drafts if role is ModelRole.TARGET else 1,
        max_blocks_each=-(-model.max_positions // config.block_size),
        requested=config.cudagraph_capture_sizes,
        block_size=config.block_size,
    )


def _draft_graphs(config: EngineConfig, num_layers: int, role: ModelRole) -> DraftGraphs:
    """The target's own layers draft only with layer skipping."""
    speculation = config.speculation
    if role is ModelRole.DRAFTER:
        return DraftGraphs(windows=(WINDOW,))
    if speculation.skips_layers:
        return DraftGraphs(windows=(WINDOW,), depths=(draft_layers(speculation.draft_layers, num_layers),))
    return DraftGraphs()
