"""How much there is to parse in the bytes of a body, known before anything is parsed.

A parser makes an object of every value and lets nothing else run meanwhile, not even from a thread of its own: 32
MiB of empty lists would hold up all other requests for seconds. So values are counted first, in small pieces
between which others get their turn. Knows no field and no schema.
"""

from faser.api.protocol.errors import HttpError

MAX_VALUES = 1 << 20  # the token ids of a hundred long prompts; about 0.1 s to parse
MAX_NESTED = 1 << 17  # objects, lists and their keys cost seven times as much
_PIECE_BYTES = 1 << 18


def check_size(raw: bytes) -> None:
    """Raises HttpError (413) for a body of more values than anybody needs. Text, however long, is one value.

    raw: JSON; of anything else the count means nothing, and the parser will say so.
    """
    values, nested = count(raw)
    if values > MAX_VALUES:
        raise HttpError(413, f"the body has {values} values or more; at most {MAX_VALUES} are allowed")
    if nested > MAX_NESTED:
        raise HttpError(
            413, f"the body has {nested} objects, lists and keys or more; at most {MAX_NESTED} are allowed"
        )


def count(raw: bytes, *, piece_bytes: int = _PIECE_BYTES) -> tuple[int, int]:
    """(commas, objects and lists and keys) outside of texts, as far as it takes to exceed a limit."""
    values = nested = begin = 0
    in_text = False
    while begin < len(raw) and values <= MAX_VALUES and nested <= MAX_NESTED:
        piece = _piece(raw, begin, piece_bytes)
        begin += len(piece)
        # Without its escapes, every quotation mark left begins or ends a text.
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_text::2])
        in_text ^= len(parts) % 2 == 0
        values += outside.count(b",")
        nested += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
    return values, nested


def _piece(raw: bytes, begin: int, piece_bytes: int) -> bytes:
    """The next bytes to look at; an escape is not cut in two."""
    piece = raw[begin : begin + piece_bytes]
    backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return raw[begin : begin + len(piece) + backslashes % 2]
