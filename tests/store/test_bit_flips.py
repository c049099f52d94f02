"""A single bit that flipped in any file of a KV directory, before the start."""

import asyncio
import shutil
from pathlib import Path

import pytest

from router.base.errors import KvError
from router.base.types import KvDir
from tests.e2e.test_upgrades import DIRECTORIES
from tests.support.files.stores import Stores

pytestmark = pytest.mark.thorough

FILES = sorted(DIRECTORIES[-1].iterdir())[:2]  # a state file, and its manifest
EACH = 307  # bits between two flips of a state file: 150 starts


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.suffix[1:])
async def test_what_comes_back_is_as_it_was(tmp_path: Path, file: Path) -> None:
    whole = await asyncio.to_thread(file.read_bytes)
    step = EACH if file.suffix == ".kv" else 17
    unharmed = 0
    for bit in range(0, len(whole) * 8, step):
        kv_dir = tmp_path / str(bit)
        shutil.copytree(DIRECTORIES[-1], kv_dir)
        kv_dir.chmod(0o700)
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (kv_dir / file.name).write_bytes(flipped)
        stores = Stores((KvDir(str(kv_dir)),))
        store = stores.make(fsync=False)
        for snapshot in await store.load():
            try:
                name = await store.open(snapshot, snapshot.kv_dir, 0)
            except KvError:
                continue
            right = (DIRECTORIES[-1] / f"kvf-{snapshot.id}.kv").read_bytes()
            assert (kv_dir / name).read_bytes() == right, bit
            unharmed += snapshot.id not in file.name
        await stores.aclose()
        shutil.rmtree(kv_dir)
    assert unharmed == len(range(0, len(whole) * 8, step)), "the other snapshot is used each time"
