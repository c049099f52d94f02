"""`router.store.learned_rates`: speeds on disk survive a restart, and damage costs nothing else."""

import os
from pathlib import Path

import pytest

from router.base.types import KvDir, LearnedRates, Namespace
from router.store.learned_rates import read_rates, write_rates

A, B = Namespace("a"), Namespace("b")
RATES = LearnedRates(
    prefill=(0.001, 1e-8),
    save=(0.01, 1e-9),
    restore=(0.02, 1e-9),
    rewrite=(0.03, 1e-9),
    handling_s=0.004,
    output_tokens=300.0,
    output_s_per_token=0.02,
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    kv_dir = KvDir(str(tmp_path))
    assert read_rates(kv_dir) == {}

    write_rates(kv_dir, {A: RATES})
    write_rates(kv_dir, {B: RATES})

    assert read_rates(kv_dir) == {A: RATES, B: RATES}
    assert os.listdir(tmp_path) == ["kvf-rates.json"]


def test_a_damaged_file_is_no_file(tmp_path: Path) -> None:
    """Every bit of it."""
    kv_dir = KvDir(str(tmp_path))
    write_rates(kv_dir, {A: RATES})
    path = tmp_path / "kvf-rates.json"
    raw = path.read_bytes()
    for at in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        for rates in read_rates(kv_dir).values():
            assert isinstance(rates, LearnedRates)


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[" * 100_000, b'{"a": 1}'])
def test_anything_else_is_no_file(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "kvf-rates.json").write_bytes(raw)

    assert read_rates(KvDir(str(tmp_path))) == {}
