"""The text that n-gram models are counted in: what models answered to questions of their own making.

    ANSWERS="python -m benchmarks speculation.text_answers self-made"
    $ANSWERS smol.jsonl --count 640 --seed 1
    $ANSWERS qwen.jsonl --count 400 --seed 1 --model qwen2.5-coder-1.5b
    python -m benchmarks speculation.answers_text make OUT.txt.xz smol.jsonl qwen.jsonl=qwen2.5-coder-1.5b
    python -m benchmarks speculation.answers_text compare RECORDED.jsonl COSTS.json OUT.json [--model MODEL]
        --text own=smol.txt.xz --text "another model's"=qwen.txt.xz --text both=OUT.txt.xz

make: each file of answers goes with the model that has made it; without one it is the default model. Both models
are under the Apache license 2.0. The package has faser/engine/checkpoints/ngrams/answers.txt.xz.
compare: what tables counted in these texts gain for a model, one request at a time, in counted time: RECORDED and
COSTS as of text_answers counted.
"""

import argparse
import json
import lzma
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runner import Json, about, command_line, write_json
from benchmarks.speculation.text_answers import CountedEngine, read
from faser.config.environment import cache_dir
from faser.config.speculation import NONE
from faser.engine.checkpoints.ngram_model import ANSWERS_END, count, save
from faser.engine.checkpoints.source import cached
from faser.engine.text.tokenizer import load_tokenizer


def main() -> None:
    parser = command_line(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("out", type=Path)
    making.add_argument("answers", nargs="+", metavar="FILE[=MODEL]")
    comparing = commands.add_parser("compare")
    comparing.add_argument("answers", type=Path)
    comparing.add_argument("costs", type=Path)
    comparing.add_argument("out", type=Path)
    comparing.add_argument("--model")
    comparing.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    comparing.add_argument("--most", type=int, default=64, help="tokens of an answer that count [64]")
    options = parser.parse_args()
    (_make if options.command == "make" else _compare)(options)


def _make(options: argparse.Namespace) -> None:
    texts: list[str] = []
    for each in options.answers:
        path, _, model = each.partition("=")
        tokenizer = load_tokenizer(cached(model or None, cache_dir()))
        texts += [tokenizer.decode(answer.tokens) for answer in read(Path(path))]
    whole = ANSWERS_END.join(text.strip() for text in dict.fromkeys(texts))
    options.out.write_bytes(lzma.compress(whole.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(texts)} answers, {len(whole):,} characters, {options.out.stat().st_size:,} bytes")


def _compare(options: argparse.Namespace) -> None:
    recorded = read(options.answers)
    step = json.loads(options.costs.read_text("utf-8"))["roles"]["step"]
    seconds = dict(zip(step["rows"], step["seconds"], strict=True))
    encode = load_tokenizer(cached(options.model, cache_dir())).encode
    result: Json = about("speculation.answers_text") | {
        "answers": len(recorded),
        "most_tokens": options.most,
        "step_ms": {rows: round(1e3 * each, 2) for rows, each in seconds.items()},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        arms: dict[str, dict[str, Any] | None] = {"off": None, "no table": {"ngram_model": NONE}}
        for each in options.text:
            name, _, path = each.partition("=")
            texts = lzma.decompress(Path(path).read_bytes()).decode().split(ANSWERS_END)
            arms[name] = {"ngram_model": f"{folder}/{len(arms)}.npz"}
            table = count([encode(text, add_special_tokens=False) for text in texts])
            save(table, Path(f"{folder}/{len(arms) - 1}.npz"))
        first: dict[float, float] = {}
        for arm, drafting in arms.items():
            engine = CountedEngine(options.model, drafting, seconds, 1)
            for temperature in sorted({each.temperature for each in recorded}):
                asked = [each for each in recorded if each.temperature == temperature]
                found = engine.answer(asked, options.most)
                gain = found["tokens_per_s"] / first.setdefault(temperature, found["tokens_per_s"])
                row = {"temperature": temperature, "arm": arm, "gain": round(gain, 3), **found}
                result["rows"].append(row)
                print(json.dumps(row), flush=True)
    write_json(options.out, result)
