"""The text that n-gram models are counted in: what models answered to questions of their own making.

    ANSWERS="python -m benchmarks.speculation.text_answers self-made"
    $ANSWERS smol.jsonl --count 640 --seed 1
    $ANSWERS qwen.jsonl --count 400 --seed 1 --model qwen2.5-coder-1.5b
    python -m benchmarks.speculation.answers_text OUT.txt.xz smol.jsonl qwen.jsonl=qwen2.5-coder-1.5b

Each file of answers goes with the model that has made it; without one it is the default model. Both models are
under the Apache license 2.0. The package has faser/engine/checkpoints/ngrams/answers.txt.xz.
"""

import lzma
from pathlib import Path

from benchmarks.runner import command_line
from benchmarks.speculation.text_answers import read
from faser.config.environment import cache_dir
from faser.engine.checkpoints.ngram_model import ANSWERS_END
from faser.engine.checkpoints.source import cached
from faser.engine.text.tokenizer import load_tokenizer


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("answers", nargs="+", metavar="FILE[=MODEL]")
    options = parser.parse_args()
    texts: list[str] = []
    for each in options.answers:
        path, _, model = each.partition("=")
        tokenizer = load_tokenizer(cached(model or None, cache_dir()))
        texts += [tokenizer.decode(answer.tokens) for answer in read(Path(path))]
    whole = ANSWERS_END.join(text.strip() for text in dict.fromkeys(texts))
    options.out.write_bytes(lzma.compress(whole.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(texts)} answers, {len(whole):,} characters, {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
