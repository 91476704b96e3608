"""Runs vLLM over shapes, prompts and lengths that it is given: a process of its own, which imports nothing else.

    python -P vllm_child.py ASKED.json OUT.jsonl

A rate is taken between two lengths of the same answers, so that prompts, which come from the prefix cache after
the first call, cancel. Where vLLM cannot be imported the one line says why. Written for vLLM 0.24.0.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def main(asked: dict[str, Any], out: str) -> None:
    began_s = time.perf_counter()
    try:
        import vllm
    except ImportError as error:
        _write(out, {"not there": f"{type(error).__name__}: {error}"})
        return
    imported_s = time.perf_counter() - began_s
    llm = vllm.LLM(**asked["engine"])
    started_s = time.perf_counter() - began_s
    about = {"version": vllm.__version__, "import_s": round(imported_s, 1), "start_s": round(started_s, 1)}
    _write(out, about)
    prompts = [{"prompt_token_ids": each} for each in asked["prompts"]]
    _seconds(vllm, llm, prompts, 1)
    for sequences in asked["batches"]:
        some = prompts[:sequences]
        _write(out, rate(lambda length, some=some: _seconds(vllm, llm, some, length), sequences, asked))  # type: ignore[misc]


def rate(seconds_of: Callable[[int], float], sequences: int, asked: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second of these sequences, the median of some rounds. seconds_of: for answers of a length.

    asked: lengths, a short and a long one, and rounds.
    """
    short, long = asked["lengths"]
    seconds_of(short)
    taken_s = [(seconds_of(long), seconds_of(short)) for _ in range(asked["rounds"])]
    rates = sorted(sequences * (long - short) / max(more - less, 1e-9) for more, less in taken_s)
    return {"sequences": sequences, "tokens_per_s": round(rates[len(rates) // 2], 1), "rounds": len(rates)}


def _seconds(vllm: Any, llm: Any, prompts: list[dict[str, Any]], max_tokens: int) -> float:
    params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    began_s = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    taken_s = time.perf_counter() - began_s
    counts = {len(answer.outputs[0].token_ids) for answer in answers}
    if counts != {max_tokens}:
        raise RuntimeError(f"answers have {sorted(counts)} tokens; {max_tokens} were asked for")
    return taken_s


def _write(out: str, row: dict[str, Any]) -> None:
    with open(out, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as given:
        main(json.load(given), sys.argv[2])
