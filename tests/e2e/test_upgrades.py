"""A KV directory that an older kvferry wrote: its snapshots are used after an upgrade.

Those of 0.1.0 are not: they had records of another kind, and are removed.

`python -m tests.e2e.test_upgrades 3` writes `kv-dir-3` as the present version would. The older ones
stay as they are: they are what users have.
"""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.conversations.conversing import saved
from tests.support.paths import ROOT
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import running

FIXTURES = ROOT / "tests" / "fixtures"
PROMPTS = [f"{letter} long story. " * 8 for letter in "AB"]
YAML = "policy: {reuse_probability: 1}\nstore: {min_tokens: 16}"
DIRECTORIES = sorted(FIXTURES.glob("kv-dir-*"))


async def write(kv_dir: Path) -> None:
    """Write a KV directory."""
    async with (
        FakeLlama(kv_dir=kv_dir, n_slots=1) as fake,
        running([("a", fake.url)], kv_dir, yaml=YAML) as kvferry,
    ):
        for number, prompt in enumerate(PROMPTS, 1):
            await kvferry.complete(prompt)
            await kvferry.until(saved(len(prompt), number))
        await kvferry.until_quiet()


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
async def test_its_snapshots_are_used(tmp_path: Path, directory: Path) -> None:
    kv_dir = tmp_path / "kv"
    shutil.copytree(directory, kv_dir)
    kv_dir.chmod(0o700)
    async with (
        FakeLlama(kv_dir=kv_dir, n_slots=1) as fake,
        running([("a", fake.url)], kv_dir, yaml=YAML) as kvferry,
    ):
        for prompt in PROMPTS:
            answer = await kvferry.complete(prompt + "And so on.")
            assert (answer.source, answer.cached >= len(prompt)) == ("snapshot", True)
            await kvferry.until_quiet()


async def test_states_of_0_1_0_are_swept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kv_dir = tmp_path / "kv"
    kv_dir.mkdir(mode=0o700)
    for name in ("kv", "json"):
        (kv_dir / f"kvf-{'0' * 32}.{name}").write_bytes(b"x")
    async with (
        FakeLlama(kv_dir=kv_dir, n_slots=1) as fake,
        running([("a", fake.url)], kv_dir, yaml=YAML) as kvferry,
    ):
        assert (await kvferry.state())["snapshots"]["count"] == 0
        assert not list(kv_dir.glob("kvf-0*"))
    assert capsys.readouterr().out.count("states of kvferry 0.1.0, which cannot be read") == 1


def test_there_is_one() -> None:
    assert DIRECTORIES


if __name__ == "__main__":
    there = FIXTURES / f"kv-dir-{sys.argv[1]}"
    there.mkdir(mode=0o700, parents=True)
    asyncio.run(write(there))
    for name in ("kvferry.lock", "kvf-blobs"):
        path = there / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
