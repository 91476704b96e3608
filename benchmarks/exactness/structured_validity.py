"""200 JSON schemas with a real model: does what is completed validate, and does speculation change a token?

    python -m benchmarks exactness.structured_validity [--model MODEL] [--at-once 16] [--out FILE]

Every schema is asked for once with speculation and once without, greedily in float32, and once more at temperature
1 with a seed. Answers that end by themselves are validated with jsonschema.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.exactness.schemas import NamedSchema, all_schemas
from benchmarks.runner import command_line, write_json
from faser import LLM
from faser.outputs import CompletionOutput
from faser.types.answer import FinishReason
from faser.types.sampling import SamplingParams, StructuredOutput, StructureKind

OFF = "off"
TEMPERATURES = (0.0, 1.0)
NUM_DRAFTS = 6


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--policy", default="fixed", help="of speculation; fixed drafts 6 tokens, paying or not")
    parser.add_argument("--every", type=int, default=1, help="ask for every n-th schema only")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    schemas = all_schemas()[:: asked.every]
    answers = {policy: _answers(asked, schemas, policy) for policy in (asked.policy, OFF)}
    result = {
        "schemas": len(schemas),
        "at_once": asked.at_once,
        "policy": asked.policy,
        **{
            f"temperature {each:g}": _compared(schemas, answers[asked.policy][each], answers[OFF][each])
            for each in TEMPERATURES
        },
    }
    print(json.dumps(result, indent=1, ensure_ascii=False))
    if asked.out is not None:
        write_json(asked.out, result)


def _answers(
    asked: argparse.Namespace, schemas: tuple[NamedSchema, ...], policy: str
) -> dict[float, list[CompletionOutput]]:
    """Answer each schema once at each temperature; return the samples by temperature."""
    settings: dict[str, Any] = {"dtype": "float32", "max_num_seqs": asked.at_once, "speculative_policy": policy}
    if policy == "fixed":
        settings["speculative_config"] = {"num_speculative_tokens": NUM_DRAFTS}
    with LLM(asked.model, **settings) as llm:
        return {
            temperature: [
                generation.outputs[0]
                for generation in llm.chat(
                    [[{"role": "user", "content": _question(each)}] for each in schemas],
                    [_sampling(each, temperature, i, asked.max_tokens) for i, each in enumerate(schemas)],
                    use_tqdm=True,
                )
            ]
            for temperature in TEMPERATURES
        }


def _question(each: NamedSchema) -> str:
    return f"Answer with JSON that is an example of {each.name.partition('-')[0]}."


def _sampling(each: NamedSchema, temperature: float, seed: int, max_tokens: int) -> SamplingParams:
    structure = StructuredOutput(kind=StructureKind.JSON, text=json.dumps(each.schema))
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, structured_output=structure)


def _compared(
    schemas: tuple[NamedSchema, ...], speculated: list[CompletionOutput], plain: list[CompletionOutput]
) -> dict[str, Any]:
    invalid: dict[str, str] = {}
    completed = 0
    for each, sample in zip(schemas, speculated, strict=True):
        if sample.finish_reason is FinishReason.STOP:
            completed += 1
            try:
                checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
                jsonschema.validate(json.loads(sample.text), each.schema, format_checker=checker)
            except (ValueError, jsonschema.ValidationError) as error:
                invalid[each.name] = f"{sample.text[:200]!r}: {str(error).splitlines()[0]}"
    pairs = zip(schemas, speculated, plain, strict=True)
    summaries = [each.speculation for each in speculated if each.speculation is not None]
    return {
        "completed": completed,
        "invalid": invalid,
        "other_tokens_without_speculation": [each.name for each, a, b in pairs if a.token_ids != b.token_ids],
        "tokens": sum(len(each.token_ids) for each in speculated),
        "steps": sum(each.steps for each in summaries),
        "verified": sum(each.verified for each in summaries),
        "accepted": sum(each.accepted for each in summaries),
    }
