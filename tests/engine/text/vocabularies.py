"""Small vocabularies of both kinds that are served, made from a seedless corpus; nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.checkpoints import tiny_tokenizer

CORPUS = (
    "the cat sat on the mat and that cat is the best cat there ever was, said the other cats "
    "in 1234 houses naïve café Straße 東京 서울 emoji 🙂 don't DON'T it's"
)
TRICKY = (
    "",
    " ",
    "   leading and   inner   ",
    "\n\n\t mixed \r\n breaks",
    "don't DON'T it'S",
    "naïve café Straße",
    "東京 서울 🙂👩‍👩‍👧 ﬀ",
    "1234567 3.14",
    "e\u0301 \u212a \u1112\u1161\u11ab",
    "<|im_start|>user\nhi<|im_end|>",
    "a<s> b</s>c",
    "\x00\x04\x7f\u2581 \u2581\u2581x",
)


def byte_level_core() -> tokenizers.Tokenizer:
    """GPT-2's kind, of 512 tokens."""
    return tiny_tokenizer()


def qwen_like_core() -> tokenizers.Tokenizer:
    """Byte-level after NFC and a pattern of its own."""
    core = tiny_tokenizer()
    core.normalizer = normalizers.NFC()
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return core


def llama3_like_core() -> tokenizers.Tokenizer:
    """Byte-level whose own rule puts a BOS before every text."""
    core = tiny_tokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", core.token_to_id("<|endoftext|>"))]
    )
    return core


def sentencepiece_pieces() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and GGUF token types of a small sentencepiece vocabulary, laid out like Llama 2's."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator([CORPUS], trainers.BpeTrainer(vocab_size=160, show_progress=False))
    ids = trained.get_vocab()
    vocabulary = sorted(ids, key=ids.__getitem__)
    joined = [token for token in vocabulary if len(token) > 1]
    single = [token for token in vocabulary if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *single]
    pieces = len(joined) + len(single)
    return tokens, [0.0] * 259 + [float(-i) for i in range(pieces)], [2, 3, 3] + [6] * 256 + [1] * pieces


def sentencepiece_core(*, prefix: bool = True) -> tokenizers.Tokenizer:
    """Sentencepiece's kind with byte fallback, as Llama 2 comes on the hub."""
    tokens, scores, _ = sentencepiece_pieces()
    known = set(tokens)
    merges = sorted(
        (-score, token[:cut], token[cut:])
        for token, score in list(zip(tokens, scores, strict=True))[259:]
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    )
    core = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [(left, right) for _, left, right in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    core.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    before: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    core.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return core


def write_tokenizer_files(directory: Path, core: tokenizers.Tokenizer, **config: Any) -> Path:
    """tokenizer.json and a tokenizer_config.json with the given entries."""
    directory.mkdir(parents=True, exist_ok=True)
    core.save(str(directory / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(content), "utf-8")
    return directory
