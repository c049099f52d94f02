"""Access to state files: the owner only, or also the group if the operator says so."""

import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.base.errors import KvError
from router.base.types import KvDir
from router.config.schema import parse
from router.store import files
from router.store.files import openness
from router.store.store import KvStore
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import configuration_text, running


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def list_of(kv_dir: Path) -> list[Path]:
    return sorted(kv_dir.iterdir())


def store(kv_dir: Path, *, group_access: bool) -> KvStore:
    return KvStore([KvDir(str(kv_dir))], wall_now=lambda: 1.0, group_access=group_access)


@pytest.mark.parametrize(
    ("mode", "group_access", "whom"),
    [
        (0o700, False, None),
        (0o700, True, None),
        (0o770, True, None),
        (0o2770, True, None),
        (0o750, True, None),
        (0o770, False, "its group"),
        (0o710, False, "its group"),
        (0o2750, False, "its group"),
        (0o755, False, "all users"),
        (0o701, False, "all users"),
        (0o777, True, "all users"),
        (0o771, True, "all users"),
    ],
)
async def test_a_directory_that_is_too_open(
    tmp_path: Path, mode: int, group_access: bool, whom: str | None
) -> None:
    """The start is refused with a remedy; the directory's mode is not changed."""
    kv_dir = tmp_path / "a b"
    kv_dir.mkdir()
    kv_dir.chmod(mode)
    made = store(kv_dir, group_access=group_access)
    if whom is None:
        await made.load()
        await made.aclose()
    else:
        with pytest.raises(KvError) as refused:
            await made.load()
        right = "770" if group_access else "700"
        assert f"open to {whom} (mode {mode:o})" in str(refused.value)
        assert f"chmod {right} '{kv_dir}'" in str(refused.value)
        assert ("store.group_access" in str(refused.value)) == (whom == "its group")
    assert mode_of(kv_dir) == mode
    assert (openness(mode, group_access=group_access) is None) == (whom is None)


@pytest.mark.parametrize(("group_access", "mode"), [(False, 0o700), (True, 0o770)])
async def test_a_directory_that_kvferry_makes(
    tmp_path: Path, group_access: bool, mode: int
) -> None:
    before = os.umask(0)
    try:
        made = store(tmp_path / "new", group_access=group_access)
        await made.load()
        await made.aclose()
    finally:
        os.umask(before)

    assert mode_of(tmp_path / "new") == mode


async def test_a_path_that_leads_nowhere(tmp_path: Path) -> None:
    made = store(tmp_path / "mistyped" / "kv", group_access=False)

    with pytest.raises(KvError, match=r"there is no .*/mistyped; correct kv_dir \(--kv-dir\)"):
        await made.load()
    assert list_of(tmp_path) == []


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeLlama]:
    """Yield a fake that writes as a llama-server with umask 0 does."""
    before = os.umask(0)
    async with FakeLlama(kv_dir=tmp_path) as server:
        yield server
    os.umask(before)


@pytest.mark.parametrize(("group_access", "mode"), [("false", 0o600), ("true", 0o660)])
async def test_files_whatever_the_umask(
    fake: FakeLlama, tmp_path: Path, group_access: str, mode: int
) -> None:
    """Saved and cut files, records and lock have restricted modes once committed."""
    yaml = f"store: {{group_access: {group_access}}}"
    async with running([("a", fake.url)], tmp_path, yaml=yaml) as kvferry:
        await kvferry.complete("x" * 600)
        await kvferry.until(lambda state: state["snapshots"]["count"] >= 1)
        await kvferry.until_quiet()
        modes = {path.name: mode_of(path) for path in list_of(tmp_path) if path.is_file()}

    states = {name: found for name, found in modes.items() if name.endswith(".kv")}
    assert states
    assert set(states.values()) == {mode}
    assert {found for name, found in modes.items() if name not in states} == {0o600}


async def test_a_start_is_refused(tmp_path: Path, fake: FakeLlama) -> None:
    os.chmod(tmp_path, 0o755)
    with pytest.raises(KvError, match="transcripts of conversations: chmod 700"):
        async with running([("a", fake.url)], tmp_path):
            pass
    os.chmod(tmp_path, 0o700)


async def test_a_reload_is_refused(tmp_path: Path, fake: FakeLlama) -> None:
    """A refused reload changes nothing. Its error is for an operator: it names the directory."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir(mode=0o700)
    bad.mkdir()
    bad.chmod(0o755)
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text([("a", fake.url)], bad))
    assert parse(path.read_text(), "x").store.group_access is False
    async with running([("a", fake.url)], good, path=path) as kvferry:
        answer = await kvferry.reload()
        assert answer.status == 422
        assert f"chmod 700 {bad}" in answer.json["error"]["message"]
        assert kvferry.router.config.backends[0].kv_dir == good


def test_what_others_use_is_not_to_be_closed_to_them(tmp_path: Path) -> None:
    """As /tmp: with the mode of a KV directory, other programs stop."""
    tmp_path.chmod(0o1777)
    with pytest.raises(KvError, match=r"install -d -m 700 .*/kvferry") as caught:
        files.prepare_directory(tmp_path)
    assert "chmod" not in str(caught.value)
