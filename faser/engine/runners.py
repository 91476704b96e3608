"""Makes the runner of a model: eager or of recordings, with whoever chooses tokens where its logits are."""

from enum import Enum

from faser.config import EngineConfig
from faser.engine.choosing import Chooser, DeviceChooser, HostChooser
from faser.engine.graphs import GraphRunner, GraphSizes, Guessing
from faser.engine.loading import LoadedModel, Report
from faser.engine.runner import Runner
from faser.engine.sizing import most_logit_rows
from faser.engine.spec.draft_choice import WINDOW
from faser.engine.spec.layer_skip import draft_layers
from faser.engine.torch_choice import TorchChoice
from faser.kernels.backend import Backend, KvShape


class Use(Enum):
    """What a runner is for."""

    TARGET = "target"
    DRAFTER = "draft model"


def make_runner(
    config: EngineConfig, backend: Backend, model: LoadedModel, kv: KvShape, use: Use, report: Report
) -> Runner:
    """Records its steps where the device replays recordings and the config wants it."""
    decoder, capture = model.decoder, backend.capture
    most = max_logit_rows(config, use)
    choice = backend.device_choice(most, decoder.spec.vocab_size)
    if capture is None or choice is None:
        chooser: Chooser = HostChooser(backend.token_choice or TorchChoice())
        return Runner(decoder, backend, kv, chooser)
    device_chooser = DeviceChooser(choice, capture, backend.device, most)
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
        guessing=_guessing(config, decoder.spec.num_layers, use),
        report=lambda stage, done, total: report(f"{stage} of the {use.value}", done, total),
    )


def max_logit_rows(config: EngineConfig, use: Use) -> int:
    """Most rows whose logits are taken at once."""
    return most_logit_rows(config) if use is Use.TARGET else config.max_num_seqs


def recordings_bytes(config: EngineConfig, model: LoadedModel, use: Use) -> int:
    """About what the recordings of this model will take."""
    if not config.records_steps:
        return 0
    spec = model.decoder.spec
    depths = dict.fromkeys((None, *_guessing(config, spec.num_layers, use).depths))
    return _sizes(config, model, use).expected_bytes(len(set(spec.windows)), len(depths))


def _sizes(config: EngineConfig, model: LoadedModel, use: Use) -> GraphSizes:
    drafts = 0 if config.speculation.policy == "off" else config.speculation.cap
    return GraphSizes.usual(
        most_rows=config.max_num_batched_tokens,
        most_sequences=config.max_num_seqs,
        # A draft begins with what was accepted behind the last one: a row or two a sequence.
        most_drafts=drafts if use is Use.TARGET else 1,
        blocks_each=-(-model.max_positions // config.block_size),
        wanted=config.cudagraph_capture_sizes,
    )


def _guessing(config: EngineConfig, num_layers: int, use: Use) -> Guessing:
    """Layers of the target draft only by layer skipping."""
    speculation = config.speculation
    if use is Use.DRAFTER:
        return Guessing(windows=(WINDOW,))
    if speculation.policy != "off" and speculation.method == "layer_skip":
        return Guessing(windows=(WINDOW,), depths=(draft_layers(speculation.draft_layers, num_layers),))
    return Guessing()
