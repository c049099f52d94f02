"""What a client's key is: 256 random bits, of which only a digest is kept.

A plain SHA-256 is enough. Slow hashes protect what people choose, which can be guessed; of 2^256
keys none can be. It takes a microsecond, and each request pays it.
"""

import secrets
from hashlib import sha256

PREFIX = "kvf_"  # so that a key that got somewhere it should not be can be recognised
_FORM = "sha256:"


def new_key() -> str:
    """A key, to be shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """What a key is known by: 32 bytes."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def hash_text(key: str) -> str:
    """The digest as the configuration has it."""
    return _FORM + digest_of(key).hex()


def read_hash(text: object) -> bytes:
    """The digest in `hash_text`'s form. Raises ValueError, which repeats nothing: it may be the
    key itself."""
    if isinstance(text, str) and text.startswith(_FORM):
        digits = text.removeprefix(_FORM)
        if len(digits) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in digits):
            return bytes.fromhex(digits)
    raise ValueError(
        "must be sha256: and 64 hexadecimal digits, as `kvferry key NAME` prints it,"
        " and never the key itself"
    )
