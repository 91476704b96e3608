"""The offline API on a tiny model. Oracle of a batch: each prompt alone. Scripts are written as for vLLM's LLM."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faser import LLM, LoRARequest, SamplingParams
from faser.config.sources import UsageError
from faser.errors import ConfigError, RequestError
from faser.outputs import RequestOutput
from faser.sampling_params import StructuredOutputsParams
from tests.engine.checkpoints.adapter_files import write_adapter

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
EXAMPLES = Path(__file__).parents[1] / "examples"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Iterator[LLM]:
    with LLM(model=str(tiny_checkpoint), backend="torch", max_num_seqs=4, trust_remote_code=True) as model:
        yield model


def tokens(found: list[RequestOutput]) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in found]


def test_a_batch_has_the_answers_of_its_prompts_in_their_order(model: LLM) -> None:
    prompts: list[str | list[int]] = ["the cat", model.get_tokenizer().encode("on the mat"), "a"]
    batch = model.generate(prompts, GREEDY)
    alone = [model.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert tokens(batch) == tokens(alone)
    assert [each.text for each in batch] == [each.text for each in alone]
    assert all(len(each) == 4 for each in tokens(batch))


def test_results_have_the_names_of_vllm(model: LLM) -> None:
    output, by_ids = model.generate(
        prompts=[{"prompt": "the cat"}, {"prompt_token_ids": model.get_tokenizer().encode("the cat")}],
        sampling_params=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2),
        use_tqdm=False,
    )
    assert (output.prompt, by_ids.prompt) == ("the cat", None)
    assert output.prompt_token_ids == by_ids.prompt_token_ids == model.get_tokenizer().encode("the cat")
    assert output.finished
    assert len({output.request_id, by_ids.request_id}) == 2
    answer = output.outputs[0]
    assert (answer.index, answer.finish_reason, answer.finished()) == (0, "length", True)
    assert answer.text == model.get_tokenizer().decode(answer.token_ids) == by_ids.outputs[0].text
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 4
    chosen = [each[token_id] for each, token_id in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert [each.rank for each in chosen] == [1] * 4  # greedy
    assert answer.cumulative_logprob == pytest.approx(sum(each.logprob for each in chosen))
    assert all(len(each) == 2 for each in answer.logprobs)  # the chosen one is among the two likeliest


def test_parameters_may_be_changed_and_are_checked_when_used(model: LLM) -> None:
    params = model.get_default_sampling_params()
    assert (params.max_tokens, params.n, params.temperature, params.top_p) == (16, 1, 0.7, 0.95)
    params.max_tokens, params.temperature, params.ignore_eos = 2, 0.0, True
    assert tokens(model.generate("the cat", params)) == [tokens(model.generate("the cat", GREEDY))[0][:2]]
    params.top_p = 2
    with pytest.raises(RequestError, match=r"top_p is 2\.0; it must be above 0\.0 and at most 1\.0"):
        model.generate("the cat", params)


def test_each_prompt_can_have_its_own_parameters(model: LLM) -> None:
    two = SamplingParams(n=2, max_tokens=1, ignore_eos=True)
    first, second = model.generate(["the", "the"], [GREEDY, two], priority=[1, 0])
    assert (len(first.outputs), len(second.outputs)) == (1, 2)
    with pytest.raises(RequestError, match="1 sampling parameters for 2 prompts"):
        model.generate(["the", "the"], [GREEDY])
    with pytest.raises(RequestError, match="1 priorities for 2 prompts"):
        model.generate(["the", "the"], GREEDY, priority=[1])


def test_one_conversation_and_several_are_answered(model: LLM) -> None:
    conversation = [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
    (one,) = model.chat(conversation, GREEDY, chat_template=TEMPLATE)
    several = model.chat([conversation] * 2, GREEDY, chat_template=TEMPLATE, use_tqdm=False)
    assert one.prompt == "user: the cat\n"
    assert tokens(several) == tokens([one]) * 2
    assert tokens([one]) == tokens(model.generate([model.get_tokenizer().encode(one.prompt)], GREEDY))


def test_answers_have_the_structure_that_is_asked_for(model: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["the cat", "the mat"]), seed=1)
    assert model.generate("a", params)[0].text in ("the cat", "the mat")


@pytest.mark.parametrize("queued", [0, 3])
def test_a_batch_larger_than_the_queue_is_answered_whole(tiny_checkpoint: Path, queued: int) -> None:
    """Samples count, not prompts."""
    with LLM(str(tiny_checkpoint), backend="torch", max_num_seqs=4, max_num_queued_reqs=queued) as model:
        found = model.generate(["the"] * 9, SamplingParams(max_tokens=2, ignore_eos=True, n=3, temperature=1.0))
        assert [len(each.outputs) for each in found] == [3] * 9
        with pytest.raises(RequestError, match=f"n is 9; this server holds at most {4 + queued} samples"):
            model.generate(["the"], SamplingParams(n=9))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"tempo": 1}, "tempo is not a known field"),
        ({"max_tokens": -1}, "max_tokens is -1; it must be at least 0"),
        ({"use_beam_search": True}, "`use_beam_search` is not supported: there is no beam search"),
        ({"guided_decoding": object()}, "use structured_outputs"),
        ({"best_of": 2}, "best_of is 2; it must be absent or equal to n, 1"),
        ({"logit_bias": {"x": 1.0}}, "keys must be token ids"),
    ],
)
def test_wrong_parameters_are_refused_when_they_are_made(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**parameters)


def test_where_one_prompt_fails_no_other_runs_on(model: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with pytest.raises(RequestError, match="maximum context length"):
        model.generate(["the cat"] * 6 + [[1] * 5000], long)
    model._await(asyncio.sleep(0.01))  # far less than 1,200 tokens take
    assert model._engine._room.num_samples == 0


def test_values_are_read_as_tolerantly_as_over_http() -> None:
    params = SamplingParams(top_k=-1, stop="x", stop_token_ids=(1, 2), logit_bias={3: 1}, best_of=1)
    found = params.resolve(None, max_logprobs=20)
    assert (found.top_k, found.stop, found.stop_token_ids, found.logit_bias) == (0, ("x",), (1, 2), ((3, 1.0),))
    assert repr(params).startswith("SamplingParams(best_of=1, stop='x'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1}, "unknown option 'temperature'"),
        ({"max_model_length": 64}, "unknown option 'max_model_length'. Did you mean 'max-model-len'"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: '2' is known from vLLM but not supported"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"port": 80}, "port is a setting of `faser serve`"),
    ],
)
def test_options_are_answered_as_flags_are(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LLM("./no-such-model", **options)


def test_what_is_not_supported_is_refused_by_name(model: LLM) -> None:
    with pytest.raises(RequestError, match="enable_lora=True"):
        model.generate("the cat", GREEDY, lora_request=LoRARequest("one", 1, "/a"))
    with pytest.raises(RequestError, match="the prompt has the key 'multi_modal_data'"):
        model.generate({"prompt": "the cat", "multi_modal_data": {}}, GREEDY)


def test_prompts_have_adapters_as_in_vllm(tiny_checkpoint: Path, tmp_path: Path) -> None:
    one, two = (
        LoRARequest(name, number, str(write_adapter(tmp_path / name, seed=number)))
        for number, name in enumerate(("one", "two"), start=1)
    )
    prompts, message = ["the cat"] * 3, [{"role": "user", "content": "hi"}]
    with LLM(model=str(tiny_checkpoint), backend="torch", max_num_seqs=4, enable_lora=True) as model:
        base, of_one, of_two = (
            tokens(model.generate("the cat", GREEDY, lora_request=each))[0] for each in (None, one, two)
        )
        assert base != of_one != of_two != base
        assert tokens(model.generate(prompts, GREEDY, lora_request=[None, one, two])) == [base, of_one, of_two]
        chats = [
            tokens(model.chat(message, GREEDY, lora_request=each, chat_template=TEMPLATE)) for each in (None, one)
        ]
        assert chats[0] != chats[1]
        with pytest.raises(RequestError, match="2 adapters for 3 prompts"):
            model.generate(prompts, GREEDY, lora_request=[one, two])
        with pytest.raises(RequestError, match="neither a local path nor a hub id"):
            model.generate("the cat", GREEDY, lora_request=LoRARequest("x", 3, "./no-such-adapter"))


def test_a_model_that_cannot_be_served_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither a local path nor a hub id"):
        LLM("./no-such-model")


@pytest.mark.parametrize("name", ["generate", "chat", "structured_output", "embed"])
@pytest.mark.full(but=("chat", "embed"))
def test_examples_run(name: str, tiny_checkpoint: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(tiny_checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
