"""Client keys: 256 random bits each, of which only a digest is kept.

A plain SHA-256 is enough. Slow hashes protect passwords that can be guessed; none of 2^256 keys
can be. The digest takes a microsecond, and each request pays it.
"""

import secrets
from hashlib import sha256

PREFIX = "kvf_"  # makes a leaked key recognisable
_FORM = "sha256:"


def new_key() -> str:
    """Return a new key, to be shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """Return the 32-byte digest that identifies a key."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def hash_text(key: str) -> str:
    """Return the digest in the form that the configuration uses."""
    return _FORM + digest_of(key).hex()


def read_hash(text: object) -> bytes:
    """Return the digest in a text of `hash_text`'s form.

    Raises ValueError without the text, which may be the key itself.
    """
    if isinstance(text, str) and text.startswith(_FORM):
        digits = text.removeprefix(_FORM)
        if len(digits) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in digits):
            return bytes.fromhex(digits)
    raise ValueError(
        "must be sha256: and 64 hexadecimal digits, as `kvferry key NAME` prints it,"
        " and never the key itself"
    )
