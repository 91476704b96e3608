"""A whole small model on the flashinfer backend, its kernels emulated, through the steps of an engine.

Oracle: the reference backend in float32. What float16 costs is measured on the reference backend too, so that the
bound is no guess. Bugs this has been seen to catch: a residual stream that is not added to, the head's product
rounded to 16 bits.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from faser.config.engine import EngineConfig
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.startup.estimate import weight_bytes
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.triton.scaled_fp8 import ScaledFp8
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.graph_capture import GraphBatchSize
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import AttentionPlan
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.family_models import store_in_mxfp4, write_family_model
from tests.engine.checkpoints.gguf.gguf_files import convert
from tests.engine.checkpoints.low_bit_checkpoints import KINDS, write_mixture, write_mixture_pair, write_pair
from tests.engine.checkpoints.test_published_fp8 import publish
from tests.engine.execution.models.paged import BLOCK_SIZE, MAX_POSITIONS, PagedModel, Rows, load, prompt
from tests.kernels.cuda.fake_graph import fake_backend
from tests.kernels.cuda.triton.layers import backend_of
from tests.kernels.layouts import Span, layout_of, shuffled_table

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_ROWS = 32
BATCH_SIZES = (
    GraphBatchSize(rows=4, sequences=4, one_row_each=True),
    GraphBatchSize(rows=8, sequences=4, one_row_each=False),
    GraphBatchSize(rows=MAX_ROWS, sequences=4, one_row_each=False),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads of 64 channels over two KV heads."""
    config = tiny_llama_config() | {"hidden_size": 256, "intermediate_size": 320}
    shapes = llama_shapes(config)
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, config, {name: each / 2 for name, each in random_weights(shapes).items()})
    return directory


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of five experts, two of which a row passes."""
    directory = tmp_path_factory.mktemp("mixture")
    fields = {
        "vocab_size": VOCAB_SIZE,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    }
    write_family_model(directory, "qwen3_moe", fields)
    return directory


def logits(backend: Backend, checkpoint: Path, dtype: torch.dtype, *, quantization: str | None = None) -> Tensor:
    """Of all rows of the steps, eagerly."""
    decoder = load_decoder(
        checkpoint,
        backend,
        dtype,
        max_model_len=MAX_POSITIONS,
        max_rows=MAX_POSITIONS,
        quantization=quantization,
        progress=lambda *_: None,
    )
    model = PagedModel(decoder, backend, num_sequences=2)
    return torch.cat([model.step(batch) for batch in steps()])


def steps() -> list[list[Rows]]:
    """Two sequences that read in pieces, verify drafts of different lengths, lose some, and decode."""
    first, second = prompt(40, VOCAB_SIZE, seed=1), prompt(40, VOCAB_SIZE, seed=2)
    return [
        [Rows(0, 0, first[:17])],
        [Rows(1, 0, second[:20]), Rows(0, 17, first[17:18])],
        [Rows(0, 18, first[18:23], num_drafts=4), Rows(1, 20, second[20:22])],
        [Rows(0, 20, second[20:21]), Rows(1, 22, second[22:23])],
        [Rows(1, 23, second[23:27]), Rows(0, 21, first[21:22])],
    ]


def test_a_model_says_what_it_says_on_the_reference_backend(checkpoint: Path) -> None:
    wanted = logits(TorchBackend(), checkpoint, torch.float32)

    def error(backend: Backend) -> float:
        return float((logits(backend, checkpoint, torch.float16) - wanted).square().mean().sqrt())

    assert error(fake_backend()) <= 1.1 * error(TorchBackend()) < 0.01 * float(wanted.std())


def test_a_mixture_says_what_it_says_on_the_reference_backend(mixture: Path) -> None:
    """And a step as a graph says the same as one that is none; both count the experts."""
    wanted = logits(TorchBackend(), mixture, torch.float32)
    backend = fake_backend()
    found = logits(backend, mixture, torch.float16)
    assert float((found - wanted).square().mean().sqrt()) < 0.02 * float(wanted.std())
    assert 0 < backend.experts_read <= 2 * 5 * len(steps())
    graphs = GraphModel(mixture, torch.float16)
    again = torch.cat([graphs.step(batch) for batch in steps()])
    assert float((again - wanted).square().mean().sqrt()) < 0.02 * float(wanted.std())


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "gemma4_text", "qwen3_moe"])
def test_rows_of_padding_read_no_experts(kind: str, tmp_path: Path) -> None:
    """Graphs of more rows than a step has read what the eager step reads. Planted: no mask, an inverted one."""
    fields: dict[str, object] = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "num_experts": 31}
    fields |= {"head_dim": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
    if kind == "gemma4_text":
        fields |= _GEMMA4 | GEMMA4_KINDS["as 26B-A4B"]
    if kind == "qwen3_5_moe_text":
        fields |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
        fields |= {"linear_value_head_dim": 32, "shared_expert_intermediate_size": 48}
        fields |= {"layer_types": ["full_attention"] * 2}
    write_family_model(tmp_path, kind, fields)
    backend = fake_backend()
    logits(backend, tmp_path, torch.float16)
    graphs = GraphModel(tmp_path, torch.float16)
    assert graphs.backend.experts_read == 0  # captures compute padding alone
    for batch in steps():
        graphs.step(batch)
    assert 0 < graphs.backend.experts_read == backend.experts_read


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_delta_nets_and_a_shared_expert_say_what_they_say_on_the_reference_backend(
    kind: str, tmp_path: Path
) -> None:
    """Planted: no shared expert, another one's logit for it, states of the layer before, numbers sent but once."""
    fields = {"vocab_size": VOCAB_SIZE, "head_dim": 64, "num_hidden_layers": 4, "linear_num_value_heads": 4}
    fields |= {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
    if kind == "qwen3_5_moe_text":
        fields |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        fields |= {"shared_expert_intermediate_size": 48}
    write_family_model(tmp_path, kind, fields)
    wanted = logits(TorchBackend(), tmp_path, torch.float32)

    def error(backend: Backend) -> float:
        return float((logits(backend, tmp_path, torch.float16) - wanted).square().mean().sqrt())

    assert error(fake_backend()) <= 2 * error(TorchBackend()) < 0.05 * float(wanted.std())


def test_attention_sinks_and_biases_of_experts_say_what_they_say_on_the_reference_backend(tmp_path: Path) -> None:
    """Of a gpt-oss with a window of five positions; eagerly, and as graphs. Planted: biases left out, no sinks."""
    fields = {"vocab_size": VOCAB_SIZE, "head_dim": 64, "num_hidden_layers": 2, "num_local_experts": 4}
    write_family_model(tmp_path, "gpt_oss", fields | {"sliding_window": 5})
    wanted = logits(TorchBackend(), tmp_path, torch.float32)
    near = 0.02 * float(wanted.std())
    assert float((logits(fake_backend(), tmp_path, torch.float16) - wanted).square().mean().sqrt()) < near
    graphs = GraphModel(tmp_path, torch.float16)
    again = torch.cat([graphs.step(batch) for batch in steps()])
    assert float((again - wanted).square().mean().sqrt()) < near


_NEAR, _FAR = "sliding_attention", "full_attention"
_GEMMA4 = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 512,
    "layer_types": [_NEAR, _FAR, _NEAR, _NEAR, _FAR, _FAR],
    "sliding_window": 5,
    "final_logit_softcapping": 20.0,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
GEMMA4_KINDS = {
    "as E2B": {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "as 26B-A4B": {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
}


def write_gemma4(directory: Path, kind: str) -> None:
    """Tokens that give to every layer, layers that read keys of others; or values from keys, and experts.

    Queries are short: scores of heads this large, which have no scale, would choose one position, and a rounding
    another one.
    """
    write_family_model(directory, "gemma4_text", _GEMMA4 | GEMMA4_KINDS[kind])
    path = directory / "model.safetensors"
    tensors = load_file(path)
    shorter = {name: each / 10 for name, each in tensors.items() if name.endswith("q_norm.weight")}
    save_file(tensors | shorter, path, {"format": "pt"})


@pytest.mark.parametrize("kind", GEMMA4_KINDS)
def test_gemma_4_says_what_it_says_on_the_reference_backend(kind: str, tmp_path: Path) -> None:
    """Eagerly, and as graphs. What float16 costs the reference is the bound.

    Planted: values not normalised, keys of a wrong layer, a router that sees what experts see.
    """
    write_gemma4(tmp_path, kind)
    wanted = logits(TorchBackend(), tmp_path, torch.float32)

    def error(found: Tensor) -> float:
        return float((found - wanted).square().mean().sqrt())

    bound = 1.2 * error(logits(TorchBackend(), tmp_path, torch.float16))
    assert bound < 0.01 * float(wanted.std())
    assert error(logits(fake_backend(), tmp_path, torch.float16)) <= bound
    graphs = GraphModel(tmp_path, torch.float16)
    assert error(torch.cat([graphs.step(batch) for batch in steps()])) <= bound


class FloatsOfExperts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds tensors of floats that are as large as a matrix of an expert. sizes: of such matrices, in values."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes, self.found = sizes, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and each.is_floating_point() and each.numel() in self.sizes:
                self.found.add(str(func))
        return made


def test_experts_in_mxfp4_stay_as_they_are_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With biases, clamps and sinks, eagerly and as graphs; and while they are loaded no matrix of floats is made.

    Planted: a backend without such experts, the exponents of the next row, neighbours of a byte exchanged.
    """
    fields = {"vocab_size": VOCAB_SIZE, "head_dim": 64, "num_hidden_layers": 2, "num_local_experts": 4}
    write_family_model(tmp_path, "gpt_oss", fields | {"sliding_window": 5, "intermediate_size": 96})
    store_in_mxfp4(tmp_path)
    wanted = logits(TorchBackend(), tmp_path, torch.float32, quantization="none")
    near = 0.02 * float(wanted.std())
    values = 64 * 96  # of down; gate and up have twice as many
    with FloatsOfExperts({values, 2 * values, 4 * values, 8 * values}) as made, caplog.at_level("INFO", "faser"):
        decoder = load_decoder(
            tmp_path,
            fake_backend(),
            torch.float16,
            max_model_len=MAX_POSITIONS,
            max_rows=MAX_ROWS,
            progress=lambda *_: None,
        )
    assert not made.found
    assert "using experts (mxfp4) as stored, with 16-bit activations" in caplog.text
    estimated = weight_bytes(EngineConfig(model=str(tmp_path)), read_model_config(tmp_path), torch.float16)
    assert decoder.weight_bytes == pytest.approx(estimated, rel=0.02)
    graphs = GraphModel(tmp_path, torch.float16)
    again = torch.cat([graphs.step(batch) for batch in steps()])
    assert float((again - wanted).square().mean().sqrt()) < near
    assert float((logits(fake_backend(), tmp_path, torch.float16) - wanted).square().mean().sqrt()) < near


@pytest.mark.parametrize("kind", ["awq", "gptq-desc-act", "w4a16", "w8a16", "gguf"])
@pytest.mark.full(but=("awq", "gguf"))
def test_experts_in_integers_stay_as_they_are_stored(kind: str, tmp_path: Path) -> None:
    """By the kernels of a GPU, in Triton's interpreter. Oracle: a checkpoint of what the integers stand for."""
    low_bit = plain = tmp_path / "m.gguf"
    if kind == "gguf":
        config, weights = write_mixture(tmp_path / "plain")
        arrays = {name: each.numpy() for name, each in weights.items()}
        convert(config, arrays, low_bit, "qwen3moe", experts=GGMLQuantizationType.Q4_0)
    else:
        low_bit, plain = write_mixture_pair(tmp_path, KINDS[kind])
    token_ids, backend = prompt(5, 90), backend_of(None)
    found = load(low_bit, backend=backend, dtype=torch.float16).prefill(token_ids, (2,))
    wanted = load(plain, quantization="none").prefill(token_ids, ())
    assert float((found - wanted).square().mean().sqrt()) < 0.02 * float(wanted.std())


def test_a_mixture_in_8_bits_with_scales_of_blocks_says_what_its_numbers_say(tmp_path: Path) -> None:
    """By the kernels of a GPU, in Triton's interpreter."""
    fp8, plain = publish(tmp_path, "qwen3-moe", stack=False, head_dim=64, num_hidden_layers=2, num_experts=4)
    token_ids, backend = prompt(9, 90), backend_of(ScaledFp8(torch.device("cpu")))
    wanted = load(plain).prefill(token_ids, ())
    found = load(fp8, backend=backend, dtype=torch.float16).prefill(token_ids, (2,))
    assert float((found - wanted).square().mean().sqrt()) < 0.02 * float(wanted.std())


def test_logits_of_the_head_are_not_rounded_to_its_type(checkpoint: Path) -> None:
    found = logits(fake_backend(), checkpoint, torch.float16)
    assert found.dtype is torch.float32
    assert (found != found.half()).float().mean() > 0.5


class GraphModel:
    """Steps like PagedModel's, by CUDA graphs: the backbone in one, the LM head in another."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype, backend: FlashInferBackend | None = None) -> None:
        self.backend = backend = backend or fake_backend()
        self._capture = backend.graph_capture
        decoder = load_decoder(
            checkpoint, backend, dtype, max_model_len=MAX_POSITIONS, max_rows=MAX_ROWS, progress=lambda *_: None
        )
        spec = decoder.spec
        self._table = shuffled_table(2, MAX_POSITIONS // BLOCK_SIZE)
        kv = KvShape(
            heads=spec.kv_heads,
            num_blocks=self._table.numel(),
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
        cache = backend.allocate_kv(kv)
        self._token_ids = self._capture.staging_buffer(MAX_ROWS, torch.int64)
        self._plans, self._backbones, self._lm_heads = {}, {}, {}
        for size in BATCH_SIZES:
            plan = self._capture.plan(size, BLOCK_SIZE, self._table.numel())

            def backbone(size: GraphBatchSize = size, plan: AttentionPlan = plan) -> None:
                hidden = decoder.embed(self._token_ids.device[: size.rows])
                decoder.run_layers(hidden, 0, spec.num_layers, cache, plan)

            def lm_head(size: GraphBatchSize = size) -> None:
                decoder.logits(decoder.hidden[: size.rows])

            self._plans[size] = plan
            with torch.inference_mode():
                self._backbones[size] = self._capture.capture(backbone)
                self._lm_heads[size] = self._capture.capture(lm_head)
        self._decoder = decoder

    def step(self, batch: Sequence[Rows]) -> Tensor:
        count = sum(len(rows.token_ids) for rows in batch)
        one_row_each = all(len(rows.token_ids) == 1 for rows in batch)
        size = next(each for each in BATCH_SIZES if each.rows >= count and one_row_each >= each.one_row_each)
        numbers = self._token_ids.host()
        numbers[:count] = [token for rows in batch for token in rows.token_ids]
        numbers[count:] = 0
        self._token_ids.send()
        spans = [Span(sequence=rows.sequence, start=rows.start, rows=len(rows.token_ids)) for rows in batch]
        self._capture.update_plan(self._plans[size], layout_of(spans, self._table))
        self._backbones[size].replay()
        self._lm_heads[size].replay()
        (found,) = self._capture.readback((self._decoder.logit_rows[:count],)).wait()
        return torch.from_numpy(found)


def test_a_replayed_model_says_what_it_says_on_the_reference_backend(checkpoint: Path) -> None:
    """Of reading, verifying and decoding steps, each padded to the next graph batch size."""
    reference = TorchBackend()
    wanted = logits(reference, checkpoint, torch.float32)
    bound = 1.1 * float((logits(reference, checkpoint, torch.float16) - wanted).square().mean().sqrt())
    model = GraphModel(checkpoint, torch.float16)
    found = torch.cat([model.step(batch) for batch in steps()])
    assert float((found - wanted).square().mean().sqrt()) <= bound


@pytest.mark.parametrize("kind", ["awq", "gptq-desc-act", "w4a16-channel"])
def test_a_checkpoint_in_4_bits_is_multiplied_as_it_is_stored(tmp_path: Path, kind: str) -> None:
    """With the weights that its codes stand for, rounded to 16 bits."""
    low_bit, plain = write_pair(tmp_path, KINDS[kind], hidden_size=256, intermediate_size=320)
    wanted = logits(TorchBackend(), plain, torch.float32)
    backend = fake_backend()
    found = logits(backend, low_bit, torch.float16)
    rounded = logits(fake_backend(), plain, torch.float16)
    assert float((found - rounded).abs().max()) < 2.0**-7 * float(wanted.abs().max())
    assert float((found - wanted).square().mean().sqrt()) < 0.01 * float(wanted.std())


def test_weights_rounded_to_4_bits_while_loading_include_embedding_and_head(checkpoint: Path) -> None:
    wanted = logits(TorchBackend(), checkpoint, torch.float32, quantization="int4")  # rows in 8 bits there
    found = logits(fake_backend(), checkpoint, torch.float16, quantization="int4")
    plain = logits(TorchBackend(), checkpoint, torch.float32)
    error = float((found - wanted).square().mean().sqrt())
    assert error < 0.03 * float(wanted.std())
    assert error < 0.3 * float((plain - wanted).square().mean().sqrt())
