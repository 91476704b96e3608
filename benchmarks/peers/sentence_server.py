"""sentence-transformers behind /v1/embeddings, so that all systems are asked alike; in its own environment.

    python sentence_server.py MODEL --threads N --dtype bfloat16 --batch-size 8 --host HOST --port PORT

MODEL is a directory. The last token's state is the vector, scaled to length 1, unless the directory says
otherwise. One request at a time; the library sorts its texts by length.
"""

import argparse
import base64
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer


def load(model: Path, dtype: str, max_tokens: int) -> Any:
    """Return the model; a plain checkpoint gets pooling of the last token and a norm.

    A tokenizer with a chat template would make the library render every text as a message, which no other system
    does; so the model is said to take plain texts only.
    """
    weights: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if (model / "modules.json").exists():
        return SentenceTransformer(str(model), device="cpu", model_kwargs=weights)
    transformer = Transformer(
        str(model),
        processor_kwargs={"model_max_length": max_tokens},
        model_kwargs=weights,
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
    )
    tokenizer = transformer.tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="lasttoken")
    return SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")


def handler(model: Any, batch_size: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            texts = body["input"]
            vectors = model.encode(texts, batch_size=batch_size, show_progress_bar=False).astype("<f4")
            data = [
                {"index": at, "embedding": base64.b64encode(each.tobytes()).decode()}
                for at, each in enumerate(vectors)
            ]
            self._answer({"data": data, "usage": {}})

        def _answer(self, content: dict[str, Any]) -> None:
            answer = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def serve() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = load(given.model, given.dtype, given.max_tokens)
    HTTPServer((given.host, given.port), handler(model, given.batch_size)).serve_forever()


if __name__ == "__main__":
    serve()
