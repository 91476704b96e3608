"""`faser distill MODEL -o DIR`: reads the flags, makes the conversations, then the head."""

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from faser.cli.console.progress import ProgressReporter
from faser.cli.distill.arguments import HELP, DistillArguments, read_arguments
from faser.cli.distill.display import TokenBar
from faser.cli.distill.engine_source import EngineSource
from faser.cli.distill.training import train_head
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.distill.dataset import Dataset
from faser.distill.maker import AnswerSettings, ConversationMaker, fill_from_traffic
from faser.distill.operator_files import FileQuestions, TrafficFile, read_conversations
from faser.distill.questions import AskingSettings, ChatTurns, SelfAskedQuestions
from faser.engine.checkpoints.files import read_model_config
from faser.engine.checkpoints.source import resolve
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ConfigError
from faser.processes import exit_on_sigterm

_TERMINATED = 143  # 128 + SIGTERM, as shells say it


def distill(arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises ConfigError for what cannot work."""
    given = read_arguments(arguments)
    if given is None:
        print(HELP)
        return 0
    own, config = given
    with exit_on_sigterm(_TERMINATED):
        with ProgressReporter() as report:
            directory = resolve(config.model, cache_dir(), revision=config.revision, progress=report)
        tokenizer = load_tokenizer(Path(config.tokenizer or directory))
        dataset = make_conversations(own, config, directory, tokenizer)
        if not dataset.records:
            raise ConfigError(f"{own.output} has no conversations to learn from")
        if own.only_conversations:
            return 0
        return train_head(own, config, directory, dataset)


def make_conversations(
    own: DistillArguments, config: EngineConfig, directory: Path, tokenizer: Tokenizer
) -> Dataset:
    """The conversations in the output folder, as many as asked for."""
    model = read_model_config(directory)
    eos_token_ids = model.eos_token_ids
    context = min(config.max_model_len or math.inf, model.spec.max_position_embeddings)
    folder = own.output / "conversations"
    asking, answering = AskingSettings(seed=own.seed), AnswerSettings(seed=own.seed)
    about: dict[str, Any] = {"model": directory.name, "answers": _described(answering)}
    if own.traffic is not None:
        dataset = Dataset(folder, {"model": directory.name, "traffic": str(own.traffic)})
        turns = ChatTurns(tokenizer, eos_token_ids) if tokenizer.chat_template is not None else None
        found = TrafficFile(
            own.traffic, tokenizer, turns, next(iter(eos_token_ids), None), vocab_size=model.spec.vocab_size
        )
        fill_from_traffic(dataset, found, own.tokens)
        return dataset
    turns = ChatTurns(tokenizer, eos_token_ids)
    prompts = None if own.prompts is None else read_conversations(own.prompts)
    about |= {"questions": asdict(asking)} if prompts is None else {"prompts": str(own.prompts)}
    dataset = Dataset(folder, json.loads(json.dumps(about)))
    asking = replace(asking, max_tokens=min(asking.max_tokens, int(context) // 2))
    answering = replace(answering, context=int(context))
    if dataset.answer_tokens >= own.answer_tokens:
        return dataset
    engine = replace(config, speculative_policy="off") if config.speculative_config is None else config
    with ExitStack() as stack:
        with ProgressReporter() as report:
            source = stack.enter_context(EngineSource(engine, directory, tokenizer, report))
        bar = stack.enter_context(TokenBar())
        questions = SelfAskedQuestions(source, turns, asking) if prompts is None else FileQuestions(prompts)
        maker = ConversationMaker(dataset, source, turns, answering, report=bar, say=bar.say)
        maker.fill(questions, own.answer_tokens)
    return dataset


def _described(answering: AnswerSettings) -> dict[str, Any]:
    """The settings that answers follow from wherever there is room for them."""
    found = asdict(answering)
    del found["context"]
    return found
