"""Phase `grammar`: one request with a grammar among others without, against none with one. No drafts.

The grammar allows words, ended by a mark that hardly any token has, over a made-up tokenizer with as many tokens
as the 8B has. Its masks are made on the host; the others' steps go on being launched ahead.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gpu.engines import Opened, Wanted, made_up, with_engine
from benchmarks.gpu.models import write_shape
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk
from benchmarks.gpu.steps import ClosedLoop, clock_of, greedy, made_up_prompts, spread_ms
from faser.types.sampling import SamplingParams, StructuredOutput, StructureKind

_END = "<|end|>"
_WORDS = StructuredOutput(kind=StructureKind.REGEX, text="([a-z]+ )*!")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def run(plan: Plan, desk: Desk) -> None:
    sizes = plan.sizes
    directory = write_shape(plan.models / "worded", sizes.target)
    write_tokenizer(directory, int(sizes.target["vocab_size"]))
    desk.say("loading target")
    wanted = Wanted(
        target=directory,
        sequences=sizes.beside,
        context=sizes.context,
        rows=sizes.rows,
        sources=made_up(plan),
    )

    def work(opened: Opened) -> None:
        loop = ClosedLoop(opened.engine, clock_of(plan.device))
        prompts = made_up_prompts(sizes.beside, sizes.context, opened.info.vocab_size)
        for grammars in (0, 1, 0):
            if not desk.may_begin(f"{sizes.beside} sequences, {grammars} with a grammar"):
                continue
            loop.start(prompts, lambda place, grammars=grammars: asked(place < grammars))  # type: ignore[misc]
            loop.warm()
            steps = loop.look(seconds=sizes.cell_s, steps=sizes.steps)
            loop.stop()
            desk.append(
                "cells",
                {
                    "grammars": grammars,
                    "sequences": sizes.beside,
                    "period_ms": spread_ms(steps.device_s),
                    "host_ms": spread_ms(steps.host_s),
                    "tokens_per_s": round(steps.tokens_per_s, 1),
                },
            )

    with_engine(plan, wanted, work)


def asked(has_grammar: bool) -> SamplingParams:
    if not has_grammar:
        return greedy(0)
    return SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, structured_output=_WORDS)


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """All bytes, and made-up words up to the vocabulary's size."""
    tokens = dict.fromkeys((_END, *sorted(pre_tokenizers.ByteLevel.alphabet())))
    generator = np.random.default_rng(3)
    while len(tokens) < vocab_size:
        lengths = generator.integers(2, 9, size=vocab_size)
        drawn = generator.integers(len(_LETTERS), size=(vocab_size, 8))
        for length, letters in zip(lengths.tolist(), drawn.tolist(), strict=True):
            tokens["".join(_LETTERS[each] for each in letters[:length])] = None
    vocab = {token: place for place, token in enumerate(list(tokens)[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
