"""Seals: how objects of the cold tier are encrypted here, before anybody else has them.

A sealed object is a salt and pieces of AES-256-GCM. Its key is derived from the key file, the salt
and its name, so no nonce is used twice, and no object can be put in the place of another one.
"""

import os
from collections.abc import Iterator

from blake3 import blake3

from router.base.errors import KvFileError
from router.store.blobs.buffer import Buffer

PIECE = 1 << 20  # AES holds the interpreter's lock: 0.5 ms for so many bytes
_SALT_BYTES, _TAG_BYTES, _NONCE_BYTES = 16, 16, 12


class Sealed:
    """Objects are encrypted with a key that the store does not have."""

    def __init__(self, key: bytes) -> None:
        """Raises ModuleNotFoundError without the package `cryptography`."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._key = blake3(key, derive_key_context="kvferry 2026 seal of the cold tier").digest()
        self._cipher, self._invalid = AESGCM, InvalidTag

    def sealed_bytes(self, size_bytes: int) -> int:
        """Return the size of the object that holds so many bytes."""
        return _SALT_BYTES + size_bytes + _TAG_BYTES * len(list(_pieces(size_bytes)))

    def seal(self, name: str, raw: memoryview, buffer: Buffer) -> memoryview:
        """Return the object that holds `raw`; valid until the next use of `buffer`."""
        sealed = buffer.of(self.sealed_bytes(len(raw)))
        sealed[:_SALT_BYTES] = os.urandom(_SALT_BYTES)
        cipher = self._cipher(self._key_of(name, sealed))
        at = _SALT_BYTES
        for nonce, start, end in _pieces(len(raw)):
            size = end - start + _TAG_BYTES
            cipher.encrypt_into(nonce, raw[start:end], None, sealed[at : at + size])
            at += size
        return sealed

    def open(self, name: str, sealed: memoryview, into: memoryview) -> None:
        """Put what an object holds into `into`, of just this size. Raises KvFileError."""
        if len(sealed) != self.sealed_bytes(len(into)):
            raise KvFileError(f"{name} has another size")
        cipher = self._cipher(self._key_of(name, sealed))
        at = _SALT_BYTES
        for nonce, start, end in _pieces(len(into)):
            size = end - start + _TAG_BYTES
            try:
                cipher.decrypt_into(nonce, sealed[at : at + size], None, into[start:end])
            except self._invalid:
                raise KvFileError(f"{name} is damaged, or sealed with another key") from None
            at += size

    def _key_of(self, name: str, sealed: memoryview) -> bytes:
        return blake3(bytes(sealed[:_SALT_BYTES]) + name.encode(), key=self._key).digest()


def _pieces(size_bytes: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the nonce and the bounds of each piece. The last nonce differs: none can be cut off."""
    count = max(-(-size_bytes // PIECE), 1)
    for index in range(count):
        last = index == count - 1
        nonce = index.to_bytes(_NONCE_BYTES - 1) + bytes([last])
        yield nonce, index * PIECE, min((index + 1) * PIECE, size_bytes)
