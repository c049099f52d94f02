"""A disk is full or becomes read-only: requests continue, and saves resume when it recovers."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from router.base.types import Transfer
from router.llama.client import LlamaClient
from router.store import room
from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.prompts import ids
from tests.support.faults.consistency import assert_consistent, assert_undisturbed
from tests.support.servers.running_router import RunningRouter, is_quiet, running

pytestmark = pytest.mark.thorough

LONG = 700  # 735 kB
YAML = "store: {idle_save_after: 20ms}"
FAILED_SAVES = 'kvferry_kv_failures_total{action="save"}'
N_REQUESTS = 8
PAGE = os.sysconf("SC_PAGE_SIZE")
Mount = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Yield a function that runs `mount`; unmount everything at the end.

    Skip the test without permission to mount.
    """
    kv_dirs: list[str] = []

    def mount(*arguments: str) -> None:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting needs root: {done.stderr.strip()}")
        kv_dirs.append(arguments[-1])

    yield mount
    for kv_dir in reversed(kv_dirs):
        unmount(Path(kv_dir))


def unmount(kv_dir: Path) -> None:
    """Unmount at once, even with open files. Harmless if nothing is mounted."""
    subprocess.run(["umount", "-l", str(kv_dir)], capture_output=True, check=False)


def disk_of(mounted: Callable[..., None], kv_dir: Path, size_bytes: int) -> Path:
    """Mount a file system of `size_bytes` at `kv_dir`."""
    kv_dir.mkdir()
    mounted("-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "none", str(kv_dir))
    return kv_dir


def filled(kv_dir: Path, left_bytes: int) -> Path:
    """Fill a disk up to the last `left_bytes`, and return the file that fills it.

    Deleting the file frees the space.
    """
    ballast = kv_dir / "ballast"
    free = os.statvfs(kv_dir)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize - left_bytes)
    return ballast


async def failed_saves(kvferry: RunningRouter) -> int:
    return int((await kvferry.metrics()).get(FAILED_SAVES, 0))


def complaints(capsys: Capture) -> int:
    """Count the warnings about files since the last call."""
    told = capsys.readouterr().out.splitlines()
    return sum("_failed " in line or "_lost " in line for line in told)


@pytest.mark.fault("the disk is smaller than store.max_bytes", "while slots are saved")
async def test_a_small_disk_keeps_what_is_new(
    llama_server: StartServer,
    mounted: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """The oldest are evicted before the disk is full, for other programs too."""
    monkeypatch.setattr(room, "_EVERY_S", 0.05)
    kv_dir = disk_of(mounted, tmp_path / "disk", 16 << 20)
    server = await llama_server(slots=1, kv_dir=kv_dir)
    yaml = "store: {idle_save_after: 20ms, min_free: 1GiB}"
    async with running([("a", server.url)], kv_dir, yaml=yaml) as kvferry:
        for seed in range(30):
            await kvferry.complete(ids(seed, LONG))
            await kvferry.until(is_quiet)
        listed = (await kvferry.get("/kvferry/snapshots")).json
        assert 8 < listed["count"] < 30
        assert (await kvferry.complete(ids(29, LONG))).cached == LONG - 1
        assert await failed_saves(kvferry) == 0
        await assert_consistent(kvferry, [kv_dir])
        free = os.statvfs(kv_dir)
        assert free.f_bavail * free.f_bsize > (16 << 20) // 20, "some of a tenth is left"
    record_property("client", "right answers; the least valuable snapshots are evicted")


@pytest.mark.fault("the disk is full", "while slots are saved")
async def test_full(
    llama_server: StartServer,
    mounted: Callable[..., None],
    tmp_path: Path,
    capsys: Capture,
    record_property: Callable[[str, object], None],
) -> None:
    """A server may report success on a full disk (docs/llama-server.md section 0.4)."""
    kv_dir = disk_of(mounted, tmp_path / "disk", 16 << 20)
    server = await llama_server(slots=1, kv_dir=kv_dir)
    undisturbed = await llama_server(slots=1)
    prompts = [ids(seed, LONG) for seed in range(N_REQUESTS)]
    kept = ids(99, LONG)
    async with running([("a", server.url)], kv_dir, yaml=YAML) as kvferry:
        await kvferry.complete(kept)
        await kvferry.until(saved(LONG - 1))
        await assert_consistent(kvferry, [kv_dir])
        ballast = filled(kv_dir, 500_000)
        complaints(capsys)

        await assert_undisturbed(kvferry, undisturbed, prompts)
        again = await kvferry.complete(kept)
        assert again.cached == LONG - 1  # a committed snapshot is still readable
        await kvferry.complete(prompts[0])
        n_failed = await failed_saves(kvferry)
        assert 2 <= n_failed < N_REQUESTS
        assert complaints(capsys) == n_failed
        assert (await kvferry.state())["snapshots"]["count"] == 1

        ballast.unlink()
        await kvferry.until(lambda state: state["snapshots"]["count"] >= 2)
        await assert_undisturbed(kvferry, undisturbed, [*prompts, kept])
        await assert_consistent(kvferry, [kv_dir])
    record_property("client", "the right answers")


@pytest.mark.fault("the disk is full", "at the last bytes of a file; the server reports success")
async def test_full_at_the_last_bytes(
    llama_server: StartServer,
    mounted: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """A file shorter than `n_written` becomes no snapshot.

    Bytes buffered in the C library are lost when the file is closed, and the server does not check
    (docs/llama-server.md section 0.4).
    """
    kv_dir = disk_of(mounted, tmp_path / "disk", 16 << 20)
    server = await llama_server(slots=1, kv_dir=kv_dir)
    undisturbed = await llama_server(slots=1)
    kept, lost = ids(99, LONG), ids(1, LONG)
    plain = LlamaClient.save
    said: list[tuple[int, int]] = []

    async def noting(self: LlamaClient, slot: int, name: str) -> Transfer:
        transfer = await plain(self, slot, name)
        said.append((transfer.size_bytes, (kv_dir / name).stat().st_size))
        return transfer

    async with running([("a", server.url)], kv_dir, yaml=YAML) as kvferry:
        await kvferry.complete(kept)
        await kvferry.until(saved(LONG - 1))
        await assert_consistent(kvferry, [kv_dir])
        (row,) = (await kvferry.get("/kvferry/snapshots")).json["snapshots"]
        await kvferry.router.store.flush()  # its last file takes a page
        ballast = filled(kv_dir, (row["size_bytes"] - 1) // PAGE * PAGE)  # one page too few
        monkeypatch.setattr(LlamaClient, "save", noting)

        await assert_undisturbed(kvferry, undisturbed, [lost, kept, lost])
        await kvferry.until(lambda _: len(said) > 0)
        await kvferry.until_quiet()
        assert all(written > there for written, there in said), said
        assert await failed_saves(kvferry) == len(said)
        assert (await kvferry.state())["snapshots"]["count"] == 1
        await assert_consistent(kvferry, [kv_dir], foreign=[ballast.name])

        ballast.unlink()
        await assert_undisturbed(kvferry, undisturbed, [kept, lost])
        await kvferry.until(saved(LONG - 1, 2))
        await assert_consistent(kvferry, [kv_dir])
    record_property("client", "the right answers")


@pytest.mark.slow
@pytest.mark.fault("the disk is full", "while a prefix is cut out of a snapshot")
async def test_full_while_a_prefix_is_cut(
    llama_server: StartServer,
    mounted: Callable[..., None],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    kv_dir = disk_of(mounted, tmp_path / "disk", 16 << 20)
    a = await llama_server(slots=1, kv_dir=kv_dir, extra_args=["-a", "a"])
    b = await llama_server(slots=1, ctx=2048, kv_dir=kv_dir, extra_args=["-a", "b"])
    undisturbed = await llama_server(slots=1)
    long = ids(1, 4000)
    async with running([("a", a.url), ("b", b.url)], kv_dir, yaml=YAML) as kvferry:
        await kvferry.complete(long, model="a")
        await kvferry.until(saved(len(long) - 1))
        ballast = filled(kv_dir, 100_000)
        part = long[:1000]  # the whole prompt does not fit into b
        for number in range(4):
            answer = await kvferry.complete([*part, 300 + number], model="b")
            assert answer.status == 200
        failures = await kvferry.metrics()
        assert failures['kvferry_kv_failures_total{action="cut"}'] >= 1
        await assert_undisturbed(kvferry, undisturbed, [long, part])
        ballast.unlink()
        await assert_consistent(kvferry, [kv_dir])
    record_property("client", "the right answers")


@pytest.mark.fault("the KV directory becomes read-only", "while slots are saved and restored")
async def test_read_only(
    llama_server: StartServer,
    mounted: Callable[..., None],
    tmp_path: Path,
    capsys: Capture,
    record_property: Callable[[str, object], None],
) -> None:
    """A server that starts while its KV directory is read-only is used without snapshots."""
    kv_dir = disk_of(mounted, tmp_path / "disk", 16 << 20)
    server = await llama_server(slots=1, kv_dir=kv_dir)
    undisturbed = await llama_server(slots=1)
    prompts = [ids(seed, LONG) for seed in range(N_REQUESTS)]
    async with running([("a", server.url)], kv_dir, yaml=YAML) as kvferry:
        for number, prompt in enumerate(prompts[:2], 1):
            await kvferry.complete(prompt)
            await kvferry.until(saved(LONG - 1, number))
        await assert_consistent(kvferry, [kv_dir])
        # Files that are open for writing stay so, such as the router's lock.
        mounted("--bind", str(kv_dir), str(kv_dir))
        mounted("-o", "remount,bind,ro", str(kv_dir))
        complaints(capsys)

        answers = await assert_undisturbed(kvferry, undisturbed, prompts[:2] * 2)
        assert {answer.cached for answer in answers} == {LONG - 1}
        await assert_undisturbed(kvferry, undisturbed, prompts[2:])
        assert complaints(capsys) < N_REQUESTS - 2
        state = await kvferry.state()
        assert state["snapshots"]["count"] == 2

        server.kill()
        await kvferry.until(lambda state: not state["backends"][0]["up"])
        await server.restart()
        await kvferry.until_up()
        assert not (await kvferry.state())["backends"][0]["snapshots"]
        await assert_undisturbed(kvferry, undisturbed, prompts[:1])
    record_property("client", "the right answers")
