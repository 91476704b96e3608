"""Limits on the number of JSON values in a body, checked before the body is parsed.

A JSON parser creates an object per value and holds the interpreter lock meanwhile, also in a thread of its own: 32
MiB of empty lists would block all other requests for seconds. So the values are counted first, in pieces of
the body between which other threads run. Knows no field and no schema.
"""

from faser.api.protocol.errors import HttpError

MAX_VALUES = 1 << 20  # the token ids of a hundred long prompts; about 0.1 s to parse
MAX_NESTED = 1 << 17  # objects, lists and their keys cost seven times as much
MAX_BYTES_OUTSIDE = 12 << 20  # of strings: those values with seven digits each; numbers of sixty cost far more
_PIECE_BYTES = 1 << 18


def check_size(raw: bytes, what: str = "the body") -> None:
    """Raises HttpError (413) for a body with more values than a request can need. A string is one value.

    raw: JSON. The counts of other bytes mean nothing; the parser then reports the error. what: its name in errors.
    """
    values, nested, outside = count(raw)
    if values > MAX_VALUES:
        raise HttpError(413, f"{what} has {values} values or more; at most {MAX_VALUES} are allowed")
    if nested > MAX_NESTED:
        raise HttpError(
            413, f"{what} has {nested} objects, lists and keys or more; at most {MAX_NESTED} are allowed"
        )
    if outside > MAX_BYTES_OUTSIDE:
        raise HttpError(
            413, f"{what} has {outside} bytes or more outside of strings; at most {MAX_BYTES_OUTSIDE} are allowed"
        )


def count(raw: bytes, *, piece_bytes: int = _PIECE_BYTES) -> tuple[int, int, int]:
    """(commas; objects, lists and keys; bytes) outside of strings. Stops counting once a limit is exceeded."""
    values = nested = num_outside = begin = 0
    in_string = False
    while begin < len(raw) and values <= MAX_VALUES and nested <= MAX_NESTED and num_outside <= MAX_BYTES_OUTSIDE:
        piece = _piece(raw, begin, piece_bytes)
        begin += len(piece)
        # Without escapes, every remaining quotation mark begins or ends a string.
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        num_outside += len(outside)
        values += outside.count(b",")
        nested += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
    return values, nested, num_outside


def _piece(raw: bytes, begin: int, piece_bytes: int) -> bytes:
    """The next bytes to count in; an escape sequence is not cut in two."""
    piece = raw[begin : begin + piece_bytes]
    backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return raw[begin : begin + len(piece) + backslashes % 2]
