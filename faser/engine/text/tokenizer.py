"""Text to token ids and back: a checkpoint's tokenizer, with the exact bytes of every token.

Owns how a token is spelled: byte-level BPE, or sentencepiece with byte fallback. Knows neither the model
nor HTTP, and loads no torch. Decoding is joining the tokens' bytes and reading them as UTF-8, so text cut
at any token border joins to the same text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from faser.engine.text.length_bound import LengthBound
from faser.engine.text.token_spelling import TokenSpelling
from faser.errors import ModelError, RequestError

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """What a checkpoint says beside the vocabulary.

    chat_template: one template, named templates, or None. special_tokens: tokens that must be special even
    where the vocabulary file forgot to say so. What stands around a text is the vocabulary file's own rule.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | dict[str, str] | None = None
    special_tokens: tuple[AddedToken, ...] = ()


class Tokenizer:
    """A vocabulary in use. Reading only: threads may share one.

    vocab_size: one more than the highest token id, added tokens included. base_vocab_size: without them.
    leading_spaces: how many spaces at the very start of a text are the tokenizer's own and not the text's.
    """

    def __init__(self, core: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        """Take core over and add the special tokens to it. Raises ModelError for an unknown kind of decoder."""
        self._core = core
        core.no_truncation()
        core.no_padding()
        known = {token.content for token in core.get_added_tokens_decoder().values()}
        core.add_tokens([token for token in settings.special_tokens if token.content not in known])
        self.bos_token = settings.bos_token
        self.eos_token = settings.eos_token
        self.chat_template = settings.chat_template
        spelling = TokenSpelling.of(core)
        vocabulary = core.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = core.get_added_tokens_decoder()
        self.base_vocab_size = max((i for i in vocabulary.values() if i not in added), default=-1) + 1
        self.leading_spaces = spelling.leading_spaces
        self._bytes = [b""] * self.vocab_size
        for token, token_id in vocabulary.items():
            self._bytes[token_id] = spelling.token_bytes(token)
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._length_bound = LengthBound.of(core, spelling)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens spelled out in it become themselves.

        add_special_tokens: also put what the checkpoint wants around a text, such as a BOS.
        Raises RequestError for a lone surrogate: such a text has no UTF-8.
        """
        try:
            # As a batch of one: encode() would keep the interpreter's lock, and every other request waiting.
            (encoded,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoded.ids
        except TypeError:
            char, at = next((char, at) for at, char in enumerate(text) if "\ud800" <= char <= "\udfff")
            raise RequestError(
                f"the text has the lone surrogate U+{ord(char):04X} at character {at}; it must be valid Unicode"
            ) from None
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; U+FFFD where their bytes are no UTF-8. Ids without a token decode to nothing."""
        special = self._special if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(each) for each in ids if each not in special).decode("utf-8", "replace")
        return strip_leading(text, self.leading_spaces)

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of a token, part of a code point or not; empty for an id that has no token."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """A token alone, as text; U+FFFD stands for a part of a code point."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it, or None."""
        token_id: int | None = self._core.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special_tokens leaves this one out."""
        return token_id in self._special

    def min_tokens(self, text: str) -> int:
        """A number of tokens that encode(text) cannot fall below, found without tokenising.

        The text's UTF-8 length over what one token covers at most. 0 where that is not known, because the
        tokenizer can drop or merge text without limit.
        """
        return self._length_bound.min_tokens(text)


def strip_leading(text: str, limit: int) -> str:
    """text without its first spaces, at most limit of them."""
    spaces = len(text) - len(text.lstrip(" "))
    return text[min(spaces, limit) :]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory or of a .gguf file.

    Raises ModelError that names the file: missing, broken, or of a kind that is not supported.
    """
    if path.is_file():
        from faser.engine.text.gguf_tokenizer import read_gguf_tokenizer

        return Tokenizer(*read_gguf_tokenizer(path))
    vocabulary_path = path / "tokenizer.json"
    if not vocabulary_path.is_file():
        found = next((name for name in ("tokenizer.model", "tekken.json") if (path / name).is_file()), None)
        beside = f"; {found} alone is not enough, convert it to tokenizer.json" if found else ""
        raise ModelError(f"{path} has no tokenizer.json{beside}")
    try:
        core = tokenizers.Tokenizer.from_file(str(vocabulary_path))
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise ModelError(f"{vocabulary_path} is not a usable tokenizer: {error}") from None
    try:
        return Tokenizer(core, _read_settings(path))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _read_settings(directory: Path) -> TokenizerSettings:
    """Settings from tokenizer_config.json; special_tokens_map.json fills in what it leaves open."""
    merged = _read_object(directory / "special_tokens_map.json") | _read_object(
        directory / "tokenizer_config.json"
    )
    declared: dict[str, AddedToken] = {}
    for entry in _declared_tokens(merged):
        if (token := _added_token(entry)) is not None:
            declared.setdefault(token.content, token)
    return TokenizerSettings(
        bos_token=_content(merged.get("bos_token")),
        eos_token=_content(merged.get("eos_token")),
        chat_template=_read_chat_template(directory, merged.get("chat_template")),
        special_tokens=tuple(declared.values()),
    )


def _declared_tokens(merged: dict[str, Any]) -> list[Any]:
    """Tokens that the settings declare, in the order in which those that are new get their ids."""
    by_id = sorted((merged.get("added_tokens_decoder") or {}).items(), key=lambda entry: int(entry[0]))
    extra = merged.get("additional_special_tokens") or merged.get("extra_special_tokens") or []
    return [
        *(token for _, token in by_id),
        *(merged.get(f"{role}_token") for role in _ROLES),
        *(extra.values() if isinstance(extra, dict) else extra),
    ]


def _added_token(entry: Any) -> AddedToken | None:
    """A token written as a string or as an object with its flags; None for anything else."""
    if isinstance(entry, str):
        return AddedToken(entry, special=True, normalized=False)
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        return None
    flags = {
        name: bool(entry[name]) for name in ("lstrip", "rstrip", "normalized", "single_word") if name in entry
    }
    return AddedToken(entry["content"], special=bool(entry.get("special", True)), **flags)


def _content(entry: Any) -> str | None:
    token = _added_token(entry)
    return None if token is None else token.content


def _read_chat_template(directory: Path, configured: Any) -> str | dict[str, str] | None:
    """The template file if there is one, else the configured text or list of named texts."""
    named = {each["name"]: each["template"] for each in configured} if isinstance(configured, list) else {}
    named |= {
        path.stem: path.read_text("utf-8") for path in sorted(directory.glob("additional_chat_templates/*.jinja"))
    }
    default = configured if isinstance(configured, str) else named.get("default")
    if (path := directory / "chat_template.jinja").is_file():
        default = path.read_text("utf-8")
    if not named:
        return default
    return named if default is None else named | {"default": default}


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; it must be a JSON object")
    return content
