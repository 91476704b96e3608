"""Program: loads models as an engine does and asks each for an answer, within bounds of memory and time.

Reads JSON from standard input, a line for each model: the arguments of `check`. Writes a line for each, the
outcome and a message. It is a process of its own, since a damaged model may end it.
"""

import json
import resource
import signal
import sys
import traceback
from pathlib import Path

import torch

from faser.api.requests.chat_renderer import ChatRenderer
from faser.config.engine import EngineConfig
from faser.engine.build import build_engine
from faser.engine.checkpoints.files import read_model_config
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError, RequestError
from faser.types.request import Request
from faser.types.sampling import SamplingParams

MOST_BYTES = 4 << 30  # of address space, over what the imports have taken
MOST_SECONDS = 30  # of processor, for one model


def check(path: str, *, tokenizer: bool) -> tuple[str, str]:
    """What became of the model, and why. tokenizer: whether the model has one, which is read as well."""
    try:
        if tokenizer:
            text = load_tokenizer(Path(path))
            ChatRenderer(text, None)
            text.decode(text.encode("a model reads a prompt"))
        answer(path)
    except ConfigError as error:  # a ModelError is one
        return "refused", str(error)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = next((each for each in reversed(frames) if "/faser/" in each.filename), frames[-1])
        return "escaped", f"{type(error).__name__}: {error}, {last.filename}:{last.lineno}"
    return "answered", ""


def answer(path: str) -> None:
    """Two tokens, without drafts. A request may be refused: a model may have as few as one position."""
    fits_native = all(head_dim % 16 == 0 for _, head_dim in read_model_config(Path(path)).spec.kv_heads)
    config = EngineConfig(
        backend="native" if fits_native else "torch",
        device="cpu",
        max_num_seqs=2,
        max_num_batched_tokens=64,
        speculative_config={"policy": "off"},
    )
    engine, _ = build_engine(config, Path(path), lambda *_: None)
    try:
        engine.add(Request(request_id="0", prompt_token_ids=(1, 0, 1), sampling=SamplingParams(max_tokens=2)))
        while engine.has_work():
            engine.step()
    except RequestError:
        return
    finally:
        engine.close()


def main() -> None:
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)  # SIGPROF ends the process
        sys.stdout.write(json.dumps(check(**json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
