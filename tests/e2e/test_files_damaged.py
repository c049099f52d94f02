"""Damaged state files: no answer is wrong, and no server dies."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.prompts import ids
from tests.support.faults.consistency import assert_consistent, assert_undisturbed
from tests.support.servers.running_router import RunningRouter, running

pytestmark = pytest.mark.thorough

LONG, CHANCE = 700, 10
NO_TENANT = 65534
AS_ROOT = os.geteuid() == 0


def _truncated(file: Path, _: Path) -> None:
    """Remove the last byte, enough for a server to abort (docs/llama-server.md section 0.3)."""
    os.truncate(file, file.stat().st_size - 1)


def _longer(file: Path, _: Path) -> None:
    with file.open("ab") as writer:
        writer.write(b"more")


def _flipped(file: Path, _: Path) -> None:
    """Flip one bit of a tensor; the server would restore the file without an error."""
    with file.open("r+b") as writer:
        writer.seek(file.stat().st_size // 2)
        (byte,) = writer.read(1)
        writer.seek(-1, os.SEEK_CUR)
        writer.write(bytes([byte ^ 0x40]))


def _deleted(file: Path, _: Path) -> None:
    file.unlink()


def _replaced(file: Path, other: Path) -> None:
    shutil.copy2(other, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def _overwritten(file: Path, other: Path) -> None:
    shutil.copyfile(other, file)


def _directory(file: Path, _: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "something").touch()


def _linked(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


def _loop(file: Path, _: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def _pipe(file: Path, _: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _unreadable(file: Path, _: Path) -> None:
    file.chmod(0)


def _chowned(file: Path, _: Path) -> None:
    os.chown(file, NO_TENANT, NO_TENANT)


def _touched(file: Path, _: Path) -> None:
    file.touch()


@dataclass(frozen=True)
class Damage:
    """A way to damage a file; `harmless` if the file is as good as before."""

    do: Callable[[Path, Path], None]
    harmless: bool = False


# Root ignores modes and owners.
DAMAGES = {
    "truncated": Damage(_truncated),
    "made longer": Damage(_longer),
    "a bit flipped": Damage(_flipped),
    "deleted": Damage(_deleted),
    "replaced by another state": Damage(_replaced),
    "overwritten with another state": Damage(_overwritten),
    "replaced by a directory": Damage(_directory),
    "replaced by a link to another state": Damage(_linked),
    "replaced by a link to itself": Damage(_loop),
    "replaced by a pipe": Damage(_pipe),
    "unreadable": Damage(_unreadable, harmless=AS_ROOT),
    "touched": Damage(_touched, harmless=True),
    **({"given to another user": Damage(_chowned, harmless=True)} if AS_ROOT else {}),
}
ALL = ", ".join(DAMAGES)


async def saved_files(kvferry: RunningRouter, prompts: list[list[int]]) -> list[Path]:
    """Send each prompt, and return the state files that result."""
    files: list[Path] = []
    for number, prompt in enumerate(prompts, 1):
        await kvferry.complete(prompt)
        await kvferry.until(saved(LONG - 1, number))
        rows = (await kvferry.get("/kvferry/snapshots?limit=100")).json["snapshots"]
        (new,) = {Path(row["kv_dir"]) / row["file"] for row in rows} - set(files)
        files.append(new)
    return files


@pytest.mark.fault(f"a state file is {ALL}", "between save and restore")
@pytest.mark.parametrize(
    "running_meanwhile",
    [pytest.param(True, id="running"), pytest.param(False, id="stopped", marks=pytest.mark.slow)],
)
async def test_damaged_files(
    llama_server: StartServer,
    running_meanwhile: bool,
    record_property: Callable[[str, object], None],
) -> None:
    server = await llama_server(slots=1)
    undisturbed = await llama_server(slots=1)
    assert server.kv_dir is not None
    pid, backends = server.pid, [("a", server.url)]
    prompts = [ids(seed, LONG) for seed in range(len(DAMAGES) + 2)]

    def damage(files: list[Path]) -> None:
        other = files[-2]
        for file, one in zip(files, DAMAGES.values(), strict=False):
            one.do(file, other)

    async def look(kvferry: RunningRouter) -> None:
        answers = await assert_undisturbed(kvferry, undisturbed, prompts)
        for answer, (name, one) in zip(answers, DAMAGES.items(), strict=False):
            # By chance, the slot's last prompt may begin with a few of the same tokens.
            assert answer.cached == LONG - 1 if one.harmless else answer.cached < CHANCE, name
        assert answers[-2].cached == LONG - 1  # its file is undamaged
        assert server.pid == pid
        await assert_consistent(kvferry, [server.kv_dir])  # type: ignore[list-item]

    yaml = "store: {idle_save_after: 20ms}"
    async with running(backends, server.kv_dir, yaml=yaml) as kvferry:
        files = await saved_files(kvferry, prompts)
        await assert_consistent(kvferry, [server.kv_dir])
        if running_meanwhile:
            damage(files)
            await look(kvferry)
    if not running_meanwhile:
        damage(files)
        async with running(backends, server.kv_dir, yaml=yaml) as kvferry:
            await look(kvferry)
    record_property("client", "the right answer, computed again")
