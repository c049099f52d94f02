"""Prefix hashes: names for the beginnings of a prompt that do not tell its tokens.

Each hash is keyed with the fleet's secret and chained to the one before it, so that equal hashes
mean equal prefixes. Hosts send each other these instead of tokens (docs/hosts.md).
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b

from router.base.tokens import WIDTH, Tokens

STEP = 32  # tokens between two hashes: 8 KiB of hashes for 32,000 tokens
BLOCK = 256  # tokens between two hashes of an index, a multiple of STEP
SIZE = 8  # bytes of a hash; a hash is only a hint, so a collision costs time and nothing else

_STEP_BYTES = STEP * WIDTH


class PrefixHasher:
    """Hashes the prompts of one namespace and tenant; `secret` is the fleet's."""

    def __init__(self, secret: bytes, namespace: str, tenant: str) -> None:
        self._key = secret
        start = repr((namespace, tenant)).encode()
        self._start = blake2b(start, key=secret, digest_size=SIZE).digest()

    def hashes(self, tokens: Tokens, known: Sequence[bytes] = ()) -> list[bytes]:
        """Return the hash of each prefix of 32, 64, ... tokens.

        `known`: the first of them, if they were computed before. 1 ms for 32,000 tokens.
        """
        found = list(known)
        last = found[-1] if found else self._start
        key = self._key
        whole = len(tokens) - len(tokens) % _STEP_BYTES
        for at in range(len(found) * _STEP_BYTES, whole, _STEP_BYTES):
            step = last + tokens[at : at + _STEP_BYTES]
            last = blake2b(step, key=key, digest_size=SIZE).digest()
            found.append(last)
        return found

    def digest(self, tokens: Tokens) -> bytes:
        """Return one hash of all tokens. 0.2 ms for 32,000."""
        return blake2b(self._start + tokens, key=self._key, digest_size=SIZE).digest()

    def digests(self, tokens: Tokens, lengths: Sequence[int]) -> Iterator[bytes]:
        """Yield the digest of each prefix of so many tokens; `lengths` ascend. One pass for all."""
        running, done = blake2b(self._start, key=self._key, digest_size=SIZE), 0
        for length in lengths:
            running.update(tokens[done * WIDTH : length * WIDTH])
            done = length
            yield running.copy().digest()


def split(joined: bytes) -> list[bytes]:
    """Return the hashes that were joined for a message."""
    return [joined[at : at + SIZE] for at in range(0, len(joined), SIZE)]


def indexed(n_hashes: int) -> list[int]:
    """Return the indices of the hashes that name a content of so many hashes.

    Those at whole blocks, and all after the last whole block: a prompt that goes on after the
    content is told from one that only begins alike.
    """
    per_block = BLOCK // STEP
    blocks = n_hashes // per_block
    return [
        *range(per_block - 1, blocks * per_block, per_block),
        *range(blocks * per_block, n_hashes),
    ]
