"""Prefix hashes: equal for equal prefixes, and for nothing else."""

from router.base.prefix_hash import BLOCK, STEP, PrefixHasher, indexed
from router.base.tokens import Tokens, head, pack

HASHER = PrefixHasher(b"secret", "facts", "tenant")


def prompt(n: int, *, change: int | None = None) -> Tokens:
    ids = list(range(n))
    if change is not None:
        ids[change] = -1
    return pack(ids)


def test_one_hash_for_each_whole_step() -> None:
    assert HASHER.hashes(prompt(STEP - 1)) == []
    assert len(HASHER.hashes(prompt(3 * STEP + 5))) == 3


def test_a_common_prefix_has_common_hashes() -> None:
    one, other = HASHER.hashes(prompt(200)), HASHER.hashes(prompt(200, change=100))

    assert one[:3] == other[:3]  # 96 tokens
    assert all(mine != theirs for mine, theirs in zip(one[3:], other[3:], strict=True))


def test_known_hashes_are_gone_on_from() -> None:
    tokens = prompt(500)
    known = HASHER.hashes(head(tokens, 200))

    assert HASHER.hashes(tokens, known) == HASHER.hashes(tokens)


def test_secret_model_and_tenant_all_count() -> None:
    others = [
        PrefixHasher(b"another", "facts", "tenant"),
        PrefixHasher(b"secret", "fact", "stenant"),
        PrefixHasher(b"secret", "facts", ""),
    ]
    tokens = prompt(64)

    assert not any(set(HASHER.hashes(tokens)) & set(one.hashes(tokens)) for one in others)


def test_a_directory_gets_whole_blocks_and_the_rest_after_them() -> None:
    per_block = BLOCK // STEP

    assert indexed(3) == [0, 1, 2]
    assert indexed(2 * per_block) == [per_block - 1, 2 * per_block - 1]
    assert indexed(per_block + 2) == [per_block - 1, per_block, per_block + 1]
