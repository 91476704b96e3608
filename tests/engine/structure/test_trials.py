"""A grammar that takes too much is refused with the limit; a crash ends its trial and nothing else."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.structure.trials import COSTLY, QUICK, Budget, TrialUnwantedError
from faser.errors import GrammarCostError, RequestError
from faser.types.sampling import StructuredOutput, StructureKind
from tests.engine.structure.languages import EOS, the_compiler, the_tokenizer
from tests.waiting import until

_NEVER = {"type": "integer", "multipleOf": 9_999_991}  # compiles for hours
_LONG = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer", "multipleOf": 9_001 + i} for i in range(300)},
}


def asked(schema: Any) -> StructuredOutput:
    return StructuredOutput(kind=StructureKind.JSON, text=json.dumps(schema), param="response_format")


def chain(length: int) -> dict[str, Any]:
    """A schema whose definitions refer to each other in a row."""
    links = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "integer"}}}


def in_session(session: int) -> Iterator[int]:
    """Processes of a session."""
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(each.name)) == session:
                yield int(each.name)


@pytest.mark.parametrize("number", [99_991, 99_989, 9_999_991])
def test_multiples_of_large_numbers_are_beyond_the_quick_budget(number: int) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": number}}}
    with pytest.raises(
        GrammarCostError, match=r"more than 50 ms of processor time; use fewer or smaller"
    ) as found:
        the_compiler().matcher(asked(schema), QUICK)
    assert found.value.param == "response_format"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 100},
        {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 100_000} for i in range(50)}},
        {"enum": [f"value {i}" for i in range(1_000)]},
        chain(100),
    ],
    ids=["multipleOf", "lengths", "enum", "references"],
)
def test_ordinary_schemas_are_within_it(schema: Any) -> None:
    assert not the_compiler().matcher(asked(schema), QUICK).is_error()


def test_schemas_that_must_hold_together_are_beyond_the_largest_budget() -> None:
    patterns = [{"pattern": f".*{chr(97 + i % 26)}.*{i}.*"} for i in range(30)]
    with pytest.raises(GrammarCostError, match="more than 500 ms of processor time"):
        the_compiler().matcher(asked({"allOf": [{"type": "string"}, *patterns]}))


@pytest.mark.parametrize(
    "structure",
    [
        asked(chain(3_000)),
        StructuredOutput(
            kind=StructureKind.GRAMMAR,
            text="start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b{i}"\n' for i in range(6_000)) + 'r6000: "x"',
        ),
    ],
    ids=["schema", "Lark"],
)
def test_a_grammar_that_overflows_the_stack_is_refused(structure: StructuredOutput) -> None:
    with pytest.raises(GrammarCostError, match="overflows the stack; use fewer rules or references"):
        the_compiler().matcher(structure)


def test_a_trial_that_is_not_wanted_any_more_is_killed() -> None:
    compiler = GrammarCompiler(the_tokenizer, vocab_size=512, eos_token_ids=(EOS,))
    compiler.matcher(asked({"enum": [1]}))
    process = compiler._tokenizer()[2]._process
    assert process is not None
    with pytest.raises(TrialUnwantedError):  # as soon as all three processes run
        compiler.matcher(asked(_NEVER), Budget(1e6, is_wanted=lambda: len([*in_session(process.pid)]) < 3))
    until(lambda: [*in_session(process.pid)] == [process.pid])


def test_trials_run_side_by_side() -> None:
    """A small schema comes through while another one is tried that never ends."""
    ends = threading.Event()

    def try_the_endless() -> None:
        with pytest.raises(TrialUnwantedError):
            the_compiler().matcher(asked(_NEVER), Budget(1e6, is_wanted=lambda: not ends.is_set()))

    endless = threading.Thread(target=try_the_endless)
    endless.start()
    assert not the_compiler().matcher(asked({"enum": ["side by side"]})).is_error()
    assert endless.is_alive()
    ends.set()
    endless.join(timeout=30)
    assert not endless.is_alive()


def test_the_process_is_started_again_when_it_was_killed() -> None:
    compiler = GrammarCompiler(the_tokenizer, vocab_size=512, eos_token_ids=(EOS,))
    assert not compiler.matcher(asked({"enum": [1]})).is_error()
    trials = compiler._tokenizer()[2]
    assert trials._process is not None
    first = trials._process
    os.kill(first.pid, signal.SIGKILL)
    first.wait(timeout=30)
    assert not compiler.matcher(asked({"enum": [2]})).is_error()
    assert trials._process.pid != first.pid


def test_its_processes_end_with_the_compiler() -> None:
    compiler = GrammarCompiler(the_tokenizer, vocab_size=512, eos_token_ids=(EOS,))
    with pytest.raises(RequestError, match="at /items: Unimplemented keys"):
        compiler.matcher(asked({"items": {"uniqueItems": True}}), COSTLY)
    process = compiler._tokenizer()[2]._process
    assert process is not None
    assert process.poll() is None
    del compiler
    until(lambda: process.poll() is not None)
    assert process.returncode == 0
