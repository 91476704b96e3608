"""The offline API on a tiny model. Oracle of a batch: each prompt alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from faser import LLM, SamplingParams
from faser.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(tiny_checkpoint), backend="torch", max_num_seqs=4) as model:
        yield model


def test_a_batch_has_the_answers_of_its_prompts_in_their_order(model: LLM) -> None:
    prompts: list[str | list[int]] = ["the cat", model.tokenizer.encode("on the mat"), "a"]
    batch = model.generate(prompts, GREEDY)
    alone = [model.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [each.samples[0].token_ids for each in batch] == [each.samples[0].token_ids for each in alone]
    assert [each.text for each in batch] == [each.text for each in alone]
    assert all(len(each.samples[0].token_ids) == 4 for each in batch)


def test_each_prompt_can_have_its_own_parameters(model: LLM) -> None:
    two = SamplingParams(n=2, max_tokens=1, ignore_eos=True)
    first, second = model.generate(["the", "the"], [GREEDY, two])
    assert (len(first.samples), len(second.samples)) == (1, 2)
    with pytest.raises(RequestError, match="1 sampling parameters for 2 prompts"):
        model.generate(["the", "the"], [GREEDY])


@pytest.mark.parametrize("queued", [0, 3])
def test_a_batch_larger_than_the_queue_is_answered_whole(tiny_checkpoint: Path, queued: int) -> None:
    """Samples count, not prompts."""
    with LLM(str(tiny_checkpoint), backend="torch", max_num_seqs=4, max_num_queued_reqs=queued) as model:
        found = model.generate(["the"] * 9, SamplingParams(max_tokens=2, ignore_eos=True, n=3, temperature=1.0))
        assert [len(each.samples) for each in found] == [3] * 9
        with pytest.raises(RequestError, match=f"n is 9; this server holds at most {4 + queued} samples"):
            model.generate(["the"], SamplingParams(n=9))


def test_a_model_that_cannot_be_served_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        LLM("./no-such-model")
