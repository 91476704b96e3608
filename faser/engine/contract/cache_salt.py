"""The digest by which caches tell requests of different cache_salts apart."""

from hashlib import blake2b

SALT_BYTES = 32


def salt_digest(cache_salt: str | None) -> bytes:
    """Return 32 bytes that stand for a request's cache_salt in the prefix index, the router and the text index.

    None, the salt of requests that share with everybody, has a digest that no string has.
    """
    content = b"" if cache_salt is None else b"salt" + cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(content, digest_size=SALT_BYTES).digest()
