"""Runs vLLM over shapes, prompts and lengths that it is given: a process of its own, which imports nothing else.

    python -P vllm_child.py ASKED.json OUT.jsonl

A rate is taken between two lengths of the same answers, so that prompts, which come from the prefix cache after
the first call, cancel. Written for vLLM 0.24.0.
"""

import json
import sys
import time
from typing import Any


def main(asked: dict[str, Any], out: str) -> None:
    began_s = time.perf_counter()
    import vllm

    llm = vllm.LLM(**asked["engine"])
    _write(out, {"version": vllm.__version__, "start_s": round(time.perf_counter() - began_s, 1)})
    prompts = [{"prompt_token_ids": each} for each in asked["prompts"]]
    short, long = asked["lengths"]
    _seconds(vllm, llm, prompts, 1)
    for sequences in asked["batches"]:
        some = prompts[:sequences]
        _seconds(vllm, llm, some, short)
        taken_s = [
            (_seconds(vllm, llm, some, long), _seconds(vllm, llm, some, short)) for _ in range(asked["rounds"])
        ]
        rates = sorted(sequences * (long - short) / max(more - less, 1e-9) for more, less in taken_s)
        _write(
            out, {"sequences": sequences, "tokens_per_s": round(rates[len(rates) // 2], 1), "rounds": len(rates)}
        )


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
