"""CacheNamespaces: which requests may reuse what others left in the prefix cache and among the past answers.

Only requests of one namespace share prompts' KV blocks and drafts from past answers. A namespace belongs to one
pair of API key and `cache_salt`. Its name is a keyed hash with a secret of this process: neither key nor salt
leaves the front-end, and no client can find the name of another's namespace.
"""

import hashlib
import secrets

_SECRET_BYTES = 32


class CacheNamespaces:
    """The namespaces of one server. across_keys: the API key makes no difference."""

    def __init__(self, *, across_keys: bool) -> None:
        self._across_keys = across_keys
        self._secret = secrets.token_bytes(_SECRET_BYTES)

    def name(self, key_index: int | None, salt: str | None) -> str | None:
        """The namespace of a request; None: the one of all clients, which nothing keeps apart.

        key_index: of the API key that the request presented; None: the server has none. salt: `cache_salt`.
        """
        key = None if self._across_keys else key_index
        if key is None and salt is None:
            return None
        pair = repr((key, salt)).encode()  # repr: no two pairs look alike, and a lone surrogate is escaped
        return hashlib.blake2b(pair, key=self._secret, digest_size=_SECRET_BYTES).hexdigest()
