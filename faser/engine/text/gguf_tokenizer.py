"""Rebuilds the tokenizer of a GGUF file for the tokenizers library.

Supports the two kinds of vocabulary of the served architectures: GPT-2's byte-level BPE, where
tokenizer.ggml.pre names the rule that splits text, and sentencepiece BPE with byte fallback.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.text.tokenizer_settings import TokenizerSettings
from faser.errors import ModelError

_SPACE = "\u2581"
_MAX_PIECE_CHARS = 1024  # every way to cut a piece in two is tried


class TokenType(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splitting:
    """How byte-level text is split before merging.

    pattern: a regular expression; None: GPT-2's. single_digits: every digit is a piece of its own.
    ignore_merges: a piece that is a token is not merged. compose: text is normalised to NFC first.
    """

    pattern: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    compose: bool = False
    add_bos: bool = False


def _words_and_digits(digit_count: str) -> str:
    """The pattern of Llama 3 and Qwen, which differ only in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digit_count
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip


def _words_by_case() -> str:
    """The pattern of GPT-4o: a word begins with its capitals and ends with its small letters."""
    small, capital = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    before, after = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    return (
        f"{before}{capital}*{small}+{after}|{before}{capital}+{small}*{after}"
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = _Splitting()
_LLAMA3 = _Splitting(pattern=_words_and_digits("{1,3}"), ignore_merges=True, add_bos=True)
_SPLITTINGS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _Splitting(single_digits=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _Splitting(pattern=_words_and_digits("{1,3}")),
    "qwen2": _Splitting(pattern=_words_and_digits(""), compose=True),
    "gpt-4o": _Splitting(pattern=_words_by_case()),
}


def read_gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """The tokenizer of a GGUF file; see tokenizer_of."""
    return tokenizer_of(GgufFile(path))


def tokenizer_of(file: GgufFile) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """The tokenizer of an open GGUF file, its special tokens and its chat template.

    Raises ModelError that names an unsupported kind of vocabulary or of splitting.
    """
    tokens = file.require_list("tokenizer.ggml.tokens", str)
    types = [int(TokenType.NORMAL)] * len(tokens)
    if file.has("tokenizer.ggml.token_type"):
        types = file.require_list("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ModelError(f"{file.path} has {len(tokens)} tokens but {len(types)} token types")
    core, add_bos = _builder(file)(file, tokens, types)
    core.add_tokens(
        [
            AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        ]
    )
    bos, eos = _named_token(file, tokens, "bos"), _named_token(file, tokens, "eos")
    before = [bos] if bos is not None and file.get("tokenizer.ggml.add_bos_token", bool, add_bos) else []
    after = [eos] if eos is not None and file.get("tokenizer.ggml.add_eos_token", bool, False) else []
    if before or after:
        core.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, core.token_to_id(token)) for token in dict.fromkeys(before + after)],
        )
    return core, TokenizerSettings(bos_token=bos, eos_token=eos, chat_template=_chat_template(file))


_Builder = Callable[[GgufFile, list[str], list[int]], tuple[tokenizers.Tokenizer, bool]]


def _builder(file: GgufFile) -> _Builder:
    """The function that builds this kind of vocabulary; it returns whether a BOS is added by default."""
    match file.require("tokenizer.ggml.model", str):
        case "gpt2":
            return _byte_level
        case "llama":
            return _sentencepiece
        case other:
            raise ModelError(f"{file.path} has a tokenizer of kind {other}; supported are gpt2 and llama")


def _core(file: GgufFile, build: Callable[[], models.BPE]) -> tokenizers.Tokenizer:
    """A tokenizer with these merges. Raises ModelError if they do not match the tokens."""
    try:
        return tokenizers.Tokenizer(build())
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file.path} has a tokenizer whose merges do not fit its tokens: {error}") from None


def _byte_level(file: GgufFile, tokens: list[str], _types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    name = file.get("tokenizer.ggml.pre", str, "default")
    splitting = _SPLITTINGS.get(name)
    if splitting is None:
        raise ModelError(f"{file.path} splits text the {name} way; supported are {', '.join(_SPLITTINGS)}")
    pairs = file.require_list("tokenizer.ggml.merges", str)
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in pairs)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    core = _core(file, lambda: models.BPE(vocabulary, merges, ignore_merges=splitting.ignore_merges))
    if splitting.compose:
        core.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
    steps: list[pre_tokenizers.PreTokenizer] = [byte_level]
    if splitting.pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    if splitting.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    return core, splitting.add_bos


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    if file.get("tokenizer.ggml.remove_extra_whitespaces", bool, False):
        raise ModelError(f"{file.path} has a tokenizer that removes extra white space; that is not supported")
    scores = file.require_list("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path} has {len(tokens)} tokens but {len(scores)} scores")
    if (longest := max(map(len, tokens), default=0)) > _MAX_PIECE_CHARS:
        raise ModelError(f"{file.path} has a token of {longest} characters; the limit is {_MAX_PIECE_CHARS}")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pieces = {
        token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == TokenType.NORMAL
    }
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    core = _core(
        file,
        lambda: models.BPE(
            vocabulary, _merges_by_score(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    )
    prefixed = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    before: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefixed else []
    core.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    core.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return core, True


def _merges_by_score(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """Sentencepiece's scores as the ranked merges of BPE: the higher the score of the joined piece, the earlier.

    Source: Kudo and Richardson, arXiv:1808.06226; its BPE joins the neighbours whose piece scores best.
    """
    ranked = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    ranked.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in ranked]


def _named_token(file: GgufFile, tokens: list[str], role: str) -> str | None:
    token_id = file.get(f"tokenizer.ggml.{role}_token_id", int)
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ModelError(f"{file.path}: {role}_token_id is {token_id}, of {len(tokens)} tokens")
    return tokens[token_id]


def _chat_template(file: GgufFile) -> str | dict[str, str] | None:
    default = file.get("tokenizer.chat_template", str)
    if not file.has("tokenizer.chat_templates"):
        return default
    names = file.require_list("tokenizer.chat_templates", str)
    named = {name: file.require(f"tokenizer.chat_template.{name}", str) for name in names}
    return named if default is None else {**named, "default": default}
