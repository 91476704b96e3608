"""Makes the runner of a model: eager or of recordings, with whoever chooses tokens where its logits are."""

from collections.abc import Sequence
from enum import Enum

from faser.config.engine import EngineConfig
from faser.engine.execution.cuda_graphs.batch_sizes import DraftGraphs, GraphSizes
from faser.engine.execution.cuda_graphs.graph_runner import GraphRunner
from faser.engine.execution.drafters.draft_samplers import WINDOW
from faser.engine.execution.drafters.layer_skip import draft_layers
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.token_samplers import DeviceTokenSampler, HostTokenSampler, TokenSampler
from faser.engine.execution.sampling.torch_kernels import TorchSamplingKernels
from faser.engine.execution.startup.model_loading import LoadedModel, Report
from faser.engine.execution.startup.sizing import most_logit_rows
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.processors import PLACE_BYTES, DeviceLane
from faser.kernels.interface.shapes import KvShape


class Use(Enum):
    """What a runner is for."""

    TARGET = "target"
    DRAFTER = "draft model"


def make_runner(
    config: EngineConfig,
    backend: Backend,
    model: LoadedModel,
    kv: KvShape,
    use: Use,
    report: Report,
    places: Sequence[DeviceLane] = (),
) -> Runner:
    """Records its steps where the device replays recordings and the config wants it.

    places: parts of the device that it may be on while another runner is on the rest.
    """
    decoder, capture = model.decoder, backend.graph_capture
    most = max_logit_rows(config, use)
    choice = backend.device_sampling_kernels(most, decoder.spec.vocab_size)
    if capture is None or choice is None:
        chooser: TokenSampler = HostTokenSampler(backend.sampling_kernels or TorchSamplingKernels())
        return Runner(decoder, backend, kv, chooser)
    device_chooser = DeviceTokenSampler(choice, capture, backend.device, most)
    if not config.records_steps:
        return Runner(decoder, backend, kv, device_chooser)
    return GraphRunner(
        decoder,
        backend,
        kv,
        device_chooser,
        capture,
        sizes=_sizes(config, model, use),
        max_logit_rows=most,
        drafts=_guessing(config, decoder.spec.num_layers, use),
        lane_captures={each: lane for each in places if (lane := backend.graph_capture_on(each)) is not None},
        report=lambda stage, done, total: report(f"{stage} of the {use.value}", done, total),
    )


def max_logit_rows(config: EngineConfig, use: Use) -> int:
    """Most rows whose logits are taken at once."""
    return most_logit_rows(config) if use is Use.TARGET else config.max_num_seqs


def recordings_bytes(config: EngineConfig, model: LoadedModel, use: Use, num_places: int = 0) -> int:
    """About what the recordings of this model will take, those for parts of the device included."""
    if not config.records_steps:
        return num_places * PLACE_BYTES
    spec, sizes = model.decoder.spec, _sizes(config, model, use)
    depths = dict.fromkeys((None, *_guessing(config, spec.num_layers, use).depths))
    num_kinds = len(set(spec.windows))
    everywhere = sizes.expected_bytes(num_kinds, len(depths))
    return everywhere + num_places * (sizes.for_lanes().expected_bytes(num_kinds, len(depths)) + PLACE_BYTES)


def _sizes(config: EngineConfig, model: LoadedModel, use: Use) -> GraphSizes:
    drafts = 0 if config.speculation.policy == "off" else config.speculation.cap
    return GraphSizes.default(
        max_rows=config.max_num_batched_tokens,
        max_sequences=config.max_num_seqs,
        # A draft begins with what was accepted behind the last one: a row or two a sequence.
        max_drafts=drafts if use is Use.TARGET else 1,
        max_blocks_each=-(-model.max_positions // config.block_size),
        requested=config.cudagraph_capture_sizes,
    )


def _guessing(config: EngineConfig, num_layers: int, use: Use) -> DraftGraphs:
    """Layers of the target draft only by layer skipping."""
    speculation = config.speculation
    if use is Use.DRAFTER:
        return DraftGraphs(windows=(WINDOW,))
    if speculation.policy != "off" and speculation.method == "layer_skip":
        return DraftGraphs(windows=(WINDOW,), depths=(draft_layers(speculation.draft_layers, num_layers),))
    return DraftGraphs()
