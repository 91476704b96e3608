"""Comparing what a drafter has computed with the same computed anew: blocks of memory, and the index of texts.

tests/engine/test_drafter_rebuilds_engine.py has the keys and values of models.
"""

import ctypes
import random
from pathlib import Path

import pytest
import torch

from faser.engine.execution.drafting.cold_state import Rebuilds, differs_from_cold
from faser.engine.execution.drafting.text import LookupDrafter, TextAndModel
from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.build import library_path
from faser.kernels.cpu.library import TextRulesStruct
from tests.engine.execution.draft_lines import lines_of
from tests.engine.execution.drafting.test_text import RULES, plan_for, start_of


@pytest.fixture
def texts(kernel_cache: Path) -> LookupDrafter:
    return LookupDrafter(native_library.load(library_path(cache_dir=kernel_cache)), RULES)


def test_blocks_are_compared_bit_for_bit() -> None:
    memory = [torch.zeros(4, 3, dtype=torch.uint8), torch.ones(4, 2, dtype=torch.uint8)]
    assert not differs_from_cold(memory, [1, 3], lambda: memory[0][2].fill_(7))
    assert differs_from_cold(memory, [1, 3], lambda: memory[1][3, 1].fill_(0))
    assert not differs_from_cold(memory, [1, 3], lambda: memory[1][3, 1].fill_(0)), "it is the cold one now"
    assert not differs_from_cold(None, [1], lambda: pytest.fail("bits depend on the batch"))
    assert not differs_from_cold(memory, [], lambda: pytest.fail("there is nothing to compute"))


TEXT = [5, 6, 7, 8, 9, 10, 5, 6, 7]


def test_an_index_that_no_longer_fits_its_keys_is_made_anew(texts: LookupDrafter) -> None:
    """What is damaged is the seed of the keys: no entry is found any more by the key of its context."""
    texts.start(start_of(2, TEXT))
    texts.commit([2], [1], [8])
    drafts = lines_of(texts.propose(plan_for([2])).table)
    assert any(each.token_ids for each in drafts)
    assert not texts.rebuild("ngram", 2)
    rules_of(texts).seed ^= 1
    assert not any(each.token_ids for each in lines_of(texts.propose(plan_for([2])).table))
    assert texts.rebuild("ngram", 2)
    assert lines_of(texts.propose(plan_for([2])).table) == drafts
    assert not texts.rebuild("ngram", 2)


def test_a_corpus_with_other_tokens_than_its_index_is_found(texts: LookupDrafter) -> None:
    """Outputs have been forgotten before, so what is left does not begin at the first token."""
    random_ = random.Random(4)
    for _ in range(12):
        texts.start(start_of(0, [random_.randrange(30) for _ in range(40)], prompt_len=20))
        texts.commit([0], [1], [3])
        texts.release(0)
        assert not texts.rebuild("suffix", None), "an index that has forgotten is as good as a new one"
    corpus = corpus_tokens(texts)
    corpus[-8] += 1
    assert texts.rebuild("suffix", None)
    assert not texts.rebuild("suffix", None)


def test_only_the_drafter_of_the_method_is_compared(texts: LookupDrafter) -> None:
    both = TextAndModel([texts])
    both.start(start_of(0, TEXT))
    both.commit([0], [1], [8])
    rules_of(texts).seed ^= 1
    assert isinstance(both, Rebuilds)
    assert not both.rebuild("draft_model", 0)
    assert not both.rebuild("suffix", 7), "slot 7 has no text"
    assert both.rebuild("suffix", 0)


def rules_of(texts: LookupDrafter) -> TextRulesStruct:
    """The rules in native memory, with which the native object begins."""
    return TextRulesStruct.from_address(texts.index.address)


def corpus_tokens(texts: LookupDrafter) -> "ctypes.Array[ctypes.c_int32]":
    """The corpus' tokens in native memory, the sixth vector behind the rules. Each output ends with -1."""
    vector = ctypes.sizeof(ctypes.c_void_p) * 3
    at = texts.index.address + ctypes.sizeof(TextRulesStruct) + 5 * vector
    begin, end = (ctypes.c_void_p * 2).from_address(at)
    assert begin is not None
    assert end is not None
    found = (ctypes.c_int32 * ((end - begin) // 4)).from_address(begin)
    assert found[-1] == -1, "the layout has changed"
    return found
