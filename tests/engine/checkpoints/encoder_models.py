"""Tiny encoders of all families, made by transformers from a seed and saved as it saves them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from tests.engine.checkpoints.family_models import shake_norms

VOCAB_SIZE = 128
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 202,
    "initializer_range": 0.2,
    "pad_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "nomic_bert": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "bert": {"hidden_act": "gelu"},
    "xlm-roberta": {"type_vocab_size": 1},
    "roberta": {"type_vocab_size": 1, "hidden_act": "gelu_new"},
    # Local layers see 10 tokens each way: fewer than most texts have.
    "modernbert": {
        "local_attention": 20,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", *(f"##{x}" for x in "abcdefghijkl"))


def write_encoder(directory: Path, model_type: str, *, labels: int = 0, **fields: Any) -> Any:
    """Write a model and a tokenizer; return the model, in float32. labels: of a classifier; 0: no classifier."""
    fields = _COMMON | FAMILIES[model_type] | fields
    if labels:
        fields["num_labels"] = labels
    config = AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(11)
    auto = AutoModelForSequenceClassification if labels else AutoModel
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    shake_norms(model)
    model.save_pretrained(directory)
    write_wordpiece(directory)
    return model


def write_wordpiece(directory: Path) -> None:
    """Write a tokenizer of letters, which begins texts with [CLS], ends them with [SEP], and pads to 20 tokens."""
    vocabulary = {word: at for at, word in enumerate(WORDS)}
    core = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    core.decoder = WordPieceDecoder(prefix="##")
    core.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    core.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    core.enable_padding(length=20)
    core.enable_truncation(20)
    core.save(str(directory / "tokenizer.json"))
    settings = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_modules(directory: Path, kind: str, *, most: int | None = None) -> None:
    """Write the files of sentence-transformers: pooling by kind, then a norm. most: tokens of a text."""
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{name}"}
        for at, (path, name) in enumerate(
            (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        )
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": kind}))
    if most is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most}))
