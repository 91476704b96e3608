"""Names of GGUF files as hub repositories have them: parts, quantizations, companions."""

from pathlib import Path

import pytest

from faser.engine.checkpoints.gguf.names import choose, model_files, part_names, part_number
from faser.errors import ModelError


def test_a_part_names_all_parts() -> None:
    parts = ["Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00002-of-00002.gguf"]
    assert [part_names(part) for part in parts] == [parts, parts]
    assert part_number(Path("a/m-00002-of-00003.gguf")) == (2, 3)
    for whole in ("m.gguf", "m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-1-of-2.gguf"):
        assert part_names(whole) == [whole]
        assert part_number(Path(whole)) is None


@pytest.mark.parametrize(
    "name, quantization",
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("tinyllama-1.1b-chat-v1.0.Q5_0.gguf", "Q5_0"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("qwen2.5-7b-instruct-q8_0-00001-of-00003.gguf", "Q8_0"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Llama-IQ4_XS.gguf", "IQ4_XS"),
        ("SmolLM2-135M-Instruct-f16.gguf", "F16"),
        ("BF16/model-00001-of-00002.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Phi-3-mini-4k-instruct-fp16.gguf", "FP16"),
        ("phi-3-mini-q4.gguf", "Q4"),
        ("model.gguf", "model"),
        ("Q8ball.gguf", "Q8ball"),
    ],
)
def test_the_quantization_is_read_from_the_name(name: str, quantization: str) -> None:
    assert model_files([name]) == {quantization: name}


def test_companions_are_no_models_and_equal_quantizations_go_by_their_files() -> None:
    names = ["mmproj-F16.gguf", "x.mmproj-q8_0.gguf", "x-imatrix.gguf", "x.imatrix", "x-Q4_0.gguf", "README.md"]
    assert model_files(names) == {"Q4_0": "x-Q4_0.gguf"}
    assert model_files(["a-Q8_0.gguf", "b-Q8_0.gguf", "b-Q4_0.gguf"]) == {
        "a-Q8_0": "a-Q8_0.gguf",
        "b-Q8_0": "b-Q8_0.gguf",
        "Q4_0": "b-Q4_0.gguf",
    }


NAMES = [
    "m-Q2_K.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0-00001-of-00002.gguf",
    "m-Q8_0-00002-of-00002.gguf",
    "mmproj-F16.gguf",
]


@pytest.mark.parametrize(
    "tag, file",
    [
        (None, NAMES[1]),
        ("latest", NAMES[1]),
        ("q8_0", NAMES[2]),
        ("Q2_K", NAMES[0]),
        ("m-Q2_K.gguf", NAMES[0]),
        ("m-q8_0", NAMES[2]),
    ],
)
def test_a_tag_chooses_one_model_and_none_the_usual_one(tag: str | None, file: str) -> None:
    assert choose(NAMES, tag, repository="o/r") == file


def test_without_the_usual_quantization_the_first_is_chosen() -> None:
    assert choose(["m-Q8_0.gguf", "m-Q2_K.gguf"], None, repository="o/r") == "m-Q2_K.gguf"
    assert choose(["m-UD-Q2_K_XL.gguf", "m-Q4_0.gguf"], "Q2_K_XL", repository="o/r") == "m-UD-Q2_K_XL.gguf"


def test_an_unknown_tag_is_answered_with_those_that_are_there() -> None:
    with pytest.raises(ModelError) as caught:
        choose(NAMES, "Q5_K_M", repository="o/r")
    assert str(caught.value) == "o/r has no GGUF file of Q5_K_M; it has Q2_K, Q4_K_M, Q8_0: name one as o/r:Q2_K"
    with pytest.raises(ModelError, match="o/r has no GGUF files; name it without a tag"):
        choose(["model.safetensors", "mmproj-F16.gguf"], "Q4_0", repository="o/r")
