"""Rebuilds the tokenizer of a GGUF file for the tokenizers library.

Supports the kinds of vocabulary of the served architectures. GPT-2's is byte-level BPE: tokenizer.ggml.pre names
the rule that splits text. Sentencepiece's is BPE with byte fallback: text is not split, and scores say what is
merged first. Newer files of Gemma have the latter kind with stored merges.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from faser.engine.checkpoints.gguf.file import GgufFile
from faser.engine.checkpoints.tokenizer_settings import TokenizerSettings
from faser.errors import ModelError

_SPACE = "\u2581"
_GEMMA = "gemma4"
_MAX_PIECE_CHARS = 1024  # every way to cut a piece in two is tried

# All other added tokens of Phi-3 absorb the white space after them, which a GGUF file cannot say.
# Source: the model's tokenizer_config.json.
_PHI3_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})


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
    """Rules for splitting byte-level text before merging.

    patterns: regular expressions, in order; each cuts its matches out of the pieces that the ones before it left.
    ignore_merges: a piece that is a token is not merged. compose: text is normalised to NFC first.
    add_bos: a text begins with BOS, unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    compose: bool = False
    add_bos: bool = False


_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, marks: str = "") -> str:
    """cl100k's pattern and its kin. digits: how many stay together. marks: a class that counts as letters."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+|\p{{N}}{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
    )


def _cased_words(digits: str, contraction: str = "") -> str:
    """o200k's pattern and its kin: a word ends where case rises. contraction: part of the word before it."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contraction}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contraction}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
    )


# By the values of tokenizer.ggml.pre. The patterns are those of each model's own tokenizer.json. No model is named
# "default"; its patterns are llama.cpp's. Source of the names, of which mean the same, and of ignore_merges and
# add_bos: llama.cpp, src/llama-vocab.cpp and conversion/base.py.
SPLITTINGS = {
    name: splitting
    for names, splitting in (
        (("default",), _Splitting(patterns=(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"))),
        (("gpt-2",), _Splitting(patterns=(_GPT2,))),
        # SmolLM 1 and 2; Refact and Granite 3; StarCoder 2
        (("smollm", "refact", "starcoder"), _Splitting(patterns=(_DIGIT, _GPT2))),
        # Llama 3 and SmolLM3; Falcon 3; Pixtral
        (
            ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"),
            _Splitting(patterns=(_words("{1,3}"),), ignore_merges=True, add_bos=True),
        ),
        # Smaug; Phi-4 and Granite 4; GLM-4 as THUDM published it first
        (("smaug-bpe", "dbrx", "chatglm-bpe"), _Splitting(patterns=(_words("{1,3}"),))),
        (("glm4",), _Splitting(patterns=(_words("{1,3}"),), ignore_merges=True)),
        # Qwen 1.5 to 3, and the Qwen that DeepSeek-R1 was distilled into
        (("qwen2", "deepseek-r1-qwen"), _Splitting(patterns=(_words(""),), compose=True)),
        (("qwen35",), _Splitting(patterns=(_words("", r"\p{M}"),), compose=True)),
        # Mistral NeMo, Mistral Small 3, Ministral 3
        (("tekken",), _Splitting(patterns=(_cased_words(""),), ignore_merges=True, add_bos=True)),
        # Phi-4-mini, gpt-oss
        (("gpt-4o",), _Splitting(patterns=(_cased_words("{1,3}", f"{_CONTRACTION}?"),))),
        (
            ("deepseek-coder",),
            _Splitting(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+", _DIGIT)),
        ),
    )
    for name in names
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
    model = _model(file)
    core, add_bos = _BUILDERS[model](file, tokens, types)
    absorbs = model == "llama" and file.get("general.architecture", str) == "phi3"
    core.add_tokens(
        [
            AddedToken(
                token,
                special=kind != TokenType.USER_DEFINED,
                normalized=False,
                rstrip=absorbs and token not in _PHI3_KEEPS_SPACE,
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
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


def _model(file: GgufFile) -> str:
    """The kind of vocabulary. A Gemma converted from its tokenizer.json is gpt2 with gemma4's way to split."""
    model = file.require("tokenizer.ggml.model", str)
    if model == "gpt2" and file.get("tokenizer.ggml.pre", str) == _GEMMA:
        return _GEMMA
    if model not in _BUILDERS:
        raise ModelError(f"{file.path} has a tokenizer of kind {model}; supported are {', '.join(_BUILDERS)}")
    return model


def _core(file: GgufFile, build: Callable[[], models.BPE]) -> tokenizers.Tokenizer:
    """A tokenizer with these merges. Raises ModelError if they do not match the tokens."""
    try:
        return tokenizers.Tokenizer(build())
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file.path} has a tokenizer whose merges do not fit its tokens: {error}") from None


def _byte_level(file: GgufFile, tokens: list[str], _types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    name = file.require("tokenizer.ggml.pre", str)
    splitting = SPLITTINGS.get(name)
    if splitting is None:
        raise ModelError(
            f"{file.path} splits text the {name} way; supported are {', '.join([*SPLITTINGS, _GEMMA])}"
        )
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _stored_merges(file)
    core = _core(file, lambda: models.BPE(vocabulary, merges, ignore_merges=splitting.ignore_merges))
    if splitting.compose:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
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
    pieces = {
        token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == TokenType.NORMAL
    }
    prefixed = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    return _byte_fallback(file, tokens, types, _merges_by_score(pieces), prefixed=prefixed), True


def _gemma(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    return _byte_fallback(file, tokens, types, _stored_merges(file), prefixed=False), True


def _byte_fallback(
    file: GgufFile, tokens: list[str], types: list[int], merges: list[tuple[str, str]], *, prefixed: bool
) -> tokenizers.Tokenizer:
    """A tokenizer that writes a space as U+2581, and what the vocabulary lacks as bytes.

    prefixed: a space is put before a text, and before what follows a special token.
    """
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    core = _core(
        file,
        lambda: models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    )
    before: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefixed else []
    core.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    core.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return core


_Builder = Callable[[GgufFile, list[str], list[int]], tuple[tokenizers.Tokenizer, bool]]

# By tokenizer.ggml.model. Each returns whether a text begins with BOS unless the file says otherwise.
_BUILDERS: dict[str, _Builder] = {"gpt2": _byte_level, "llama": _sentencepiece, _GEMMA: _gemma}


def _stored_merges(file: GgufFile) -> list[tuple[str, str]]:
    pairs = file.require_list("tokenizer.ggml.merges", str)
    return [(left, right) for left, _, right in (pair.partition(" ") for pair in pairs)]


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
