"""The digest by which caches tell requests of different cache_salts and adapters apart."""

from hashlib import blake2b

from faser.types.adapter import Adapter

SALT_BYTES = 32


def salt_digest(cache_salt: str | None, adapter: Adapter | None = None) -> bytes:
    """Return 32 bytes that stand for a request's cache_salt and adapter in every cache of tokens.

    These are the prefix index, KV on disk, the router of replicas and the text index. None, the salt of requests
    that share with everybody, has a digest that no string has. What an adapter computes is found by its content
    alone: adapters of equal files share, whatever their names.
    """
    content = b"" if cache_salt is None else b"salt" + cache_salt.encode("utf-8", "surrogatepass")
    digest = blake2b(content, digest_size=SALT_BYTES).digest()
    if adapter is None:
        return digest
    return blake2b(digest + adapter.digest.encode(), digest_size=SALT_BYTES, person=b"adapter").digest()


NO_SALT = salt_digest(None)
