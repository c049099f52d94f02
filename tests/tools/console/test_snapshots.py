"""`kvferry snapshots`: its output and its questions; it drops nothing without a yes."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.base.clock import wall_now
from router.base.tokens import TokenPieces, pack
from router.base.types import KvDir, Namespace, Snapshot, SnapshotId, StateShape, Tenant
from router.tools.cli import main
from router.tools.console.client import TOKEN_ENV
from router.web.fleet.purging import Purging, Reached
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import RunningRouter, running

Capture = pytest.CaptureFixture[str]
QUIET = "{store: {idle_save_after: 'off'}, health: {interval: 60s}}"
N = 60


def snapshot(number: int) -> Snapshot:
    tokens = pack(range(10_000 * number, 10_000 * number + 100 + number))
    name, space = SnapshotId(f"{number:06d}" + "f" * 26), Namespace(f"space{number % 2}:1=2")
    shape = StateShape(2, (10, 20), extendable=False, media=True) if number == 1 else StateShape(1)
    saved_at = wall_now() - 3600.0 * number
    return Snapshot(name, space, KvDir("/kv"), TokenPieces(tokens), 2**20 * number, shape, saved_at)


@pytest.fixture
async def kvferry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningRouter]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    async with FakeLlama() as fake, running([("a", fake.url)], None, yaml=QUIET) as made:
        await made.router.engine.snapshots_found([snapshot(number) for number in range(1, N + 1)])
        yield made


async def run(kvferry: RunningRouter, *arguments: str) -> int:
    """Run the command in its own event loop, while the router goes on in this one."""
    return await asyncio.to_thread(main, ["snapshots", *arguments, "--url", kvferry.url])


async def count(kvferry: RunningRouter) -> int:
    number: int = (await kvferry.get("/kvferry/snapshots")).json["count"]
    return number


def printed(capsys: Capture) -> list[str]:
    """Return the lines on standard output, less the router's log lines."""
    return [line for line in capsys.readouterr().out.splitlines() if "[info" not in line]


class Person(StringIO):
    """A person's input at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 140])
async def test_list(
    kvferry: RunningRouter, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert await run(kvferry, "list", "--older-than", "56.5h") == 0

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    rows = [line.split() for line in lines[2:-1]]
    assert [row[0] for row in rows] == [
        "000057ffffff",
        "000058ffffff",
        "000059ffffff",
        "000060ffffff",
    ]
    assert rows[0][1:6] == ["157", "57.0MiB", "2d09h", "-", "1"]
    where = "space1:1=2" if columns == 80 else f"/kv/kvf-{snapshot(57).id}.kv"
    assert rows[0][6:] == [where]
    assert lines[-1] == "4 snapshots, 234MiB, 634 tokens"


async def test_list_is_cut_and_says_so(kvferry: RunningRouter, capsys: Capture) -> None:
    await run(kvferry, "list", "--limit", "3")

    lines = capsys.readouterr().out.splitlines()
    assert [line[:6] for line in lines[2:-1]] == ["000001", "000002", "000003"]
    assert lines[-1].endswith(", 3 shown (--limit)")


async def test_list_as_json(kvferry: RunningRouter, capsys: Capture) -> None:
    await run(kvferry, "list", "--json", "--limit", "20")

    found = json.loads(capsys.readouterr().out)
    assert [int(row["id"][:6]) for row in found["snapshots"]] == list(range(1, 21))
    assert found["count"] == N


async def test_list_of_nothing(kvferry: RunningRouter, capsys: Capture) -> None:
    assert await run(kvferry, "list", "--tenant", "nobody") == 0
    assert capsys.readouterr().out == "0 snapshots\n"


async def test_show(kvferry: RunningRouter, capsys: Capture) -> None:
    assert await run(kvferry, "show", "000001") == 0

    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["id"] == snapshot(1).id
    assert lines["namespace"] == "space1:1=2"
    beginning = " ".join(str(10_000 + n) for n in range(8))
    assert lines["tokens"] == f"101, beginning with {beginning}"
    assert lines["size"] == "1.00MiB (1,048,576 bytes)"
    shape = "2 KV streams; can only be used up to a checkpoint; checkpoints at 10, 20; media"
    assert lines["shape"] == shape
    assert lines["saved"] == "1h00m ago"
    assert lines["last"] == "restored not since it was saved or found"
    assert lines["file"] == f"/kv/kvf-{snapshot(1).id}.kv"


async def test_show_one_in_use(kvferry: RunningRouter, capsys: Capture) -> None:
    engine = kvferry.router.engine
    engine._scheduler.state.inventory.catalog.add_reference(
        snapshot(2).id, asyncio.get_running_loop().time()
    )
    await run(kvferry, "show", "000002")
    await run(kvferry, "show", "000002", "--json")

    text, _, raw = capsys.readouterr().out.partition("{")
    assert "2, the save among them; 1 at this moment" in text
    assert "1 KV stream; can be extended\n" in text
    assert json.loads("{" + raw)["in_use"] == 1


@pytest.mark.parametrize(
    ("arguments", "exit_code", "why"),
    [
        (["show", "123"], 1, "give at least 6 digits"),
        (["show", "999999"], 1, "there is no snapshot '999999'"),
        (["list", "--older-than", "5"], 2, "must be a time such as 500ms"),
        (["list", "--limit", "0"], 2, "limit: must be at least 1, not 0"),
        (["purge", "--yes"], 2, "give at least one filter, or `all`"),
        (["purge", "--yes", "--all", "--tenant", "a"], 2, "give at least one filter, or `all`"),
        (["purge", "--yes", "--everywhere"], 2, "give at least one filter, or `all`"),
        (["purge", "--yes", "--everywhere", "--all"], 2, "everywhere: needs `tenant`"),
        (
            ["purge", "--yes", "--everywhere", "--tenant", "a", "--older-than", "1h"],
            2,
            "everywhere: needs `tenant`, and no other filter",
        ),
        (["purge", "--yes", "--id", "999999"], 1, "there is no snapshot '999999'"),
    ],
)
async def test_what_the_router_refuses(
    kvferry: RunningRouter, capsys: Capture, arguments: list[str], exit_code: int, why: str
) -> None:
    """Input that the router does not understand exits as wrong usage does."""
    assert await run(kvferry, *arguments) == exit_code

    err = capsys.readouterr().err
    assert err.startswith("kvferry: ")
    assert why in err
    assert await count(kvferry) == N


@pytest.mark.parametrize(("typed", "goes"), [("y\n", True), ("n\n", False), ("\n", False)])
async def test_purge_asks(
    kvferry: RunningRouter, capsys: Capture, monkeypatch: pytest.MonkeyPatch, typed: str, goes: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Person(typed))
    capsys.readouterr()
    code = await run(kvferry, "purge", "--older-than", "57.5h")

    said = capsys.readouterr()
    assert "Purge 3 snapshots, 177MiB, 477 tokens? [y/N] " in said.err
    assert ("3 snapshots, 177MiB, 477 tokens purged" in said.out) == goes
    assert (code, await count(kvferry)) == ((0, N - 3) if goes else (1, N))


async def test_ctrl_c_is_a_no_at_once(kvferry: RunningRouter) -> None:
    """Ctrl-C once had an effect only after the next Enter."""
    ours, theirs = os.openpty()
    # A process started in the background ignores SIGINT, and so do its children.
    command = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from router.tools.cli import main; sys.exit(main())"
    )
    argv = [sys.executable, "-c", command, "snapshots", "purge", "--all", "--url", kvferry.url]
    asked = await asyncio.create_subprocess_exec(
        *argv, stdin=theirs, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert asked.stderr is not None
        async with asyncio.timeout(30):
            await asked.stderr.readuntil(b"[y/N] ")
            asked.send_signal(signal.SIGINT)
            assert await asked.wait() == 130
        assert await asked.stderr.read() == b"\n"
    finally:
        if asked.returncode is None:
            asked.kill()
        await asked.communicate()
        os.close(ours)
        os.close(theirs)
    assert await count(kvferry) == N


async def test_nobody_to_ask_is_a_no(
    kvferry: RunningRouter, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("y\n"))

    assert await run(kvferry, "purge", "--all") == 1
    assert "no terminal to ask on; use --yes" in capsys.readouterr().err
    assert await count(kvferry) == N


async def test_a_tenant_that_has_nothing_here_is_purged_elsewhere(
    kvferry: RunningRouter, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not reached is named, and the exit code says so."""
    asked: list[Tenant] = []

    async def elsewhere(_: Purging, tenant: Tenant, __: str) -> list[Reached]:
        asked.append(tenant)
        return [Reached("box-b", 3), Reached("cold tier", problem="it does not answer")]

    monkeypatch.setattr(Purging, "elsewhere", elsewhere)
    monkeypatch.setattr(sys, "stdin", Person("y\n"))
    capsys.readouterr()
    assert await run(kvferry, "purge", "--tenant", "alice", "--everywhere") == 1

    said = capsys.readouterr()
    assert "Purge 0 snapshots here, and all on other hosts and in the cold tier? [y/N]" in said.err
    assert "box-b: 3 deleted\ncold tier: not reached: it does not answer\n" in said.out
    assert asked == ["alice"]
    assert await count(kvferry) == N


async def test_purge_of_a_tenant_takes_its_salts_and_no_other(kvferry: RunningRouter) -> None:
    owned = [
        replace(snapshot(100 + at), namespace=Namespace(f"space:1=2@{tenant}"))
        for at, tenant in enumerate(("alice", "alice~salt", "alicia", "bob"))
    ]
    await kvferry.router.engine.snapshots_found(owned)
    assert await run(kvferry, "purge", "--tenant", "alice", "--yes") == 0

    left = (await kvferry.get("/kvferry/snapshots?limit=1000")).json["snapshots"]
    assert {row["tenant"] for row in left} == {None, "alicia", "bob"}


async def test_purge_dry_run(kvferry: RunningRouter, capsys: Capture) -> None:
    assert await run(kvferry, "purge", "--older-than", "59.5h", "--dry-run") == 0
    assert "1 snapshot, 60.0MiB, 160 tokens would be purged\n" in capsys.readouterr().out
    assert await count(kvferry) == N


async def test_purge_without_asking(kvferry: RunningRouter, capsys: Capture) -> None:
    """Snapshots are named by id; a snapshot in use loses its file later."""
    engine = kvferry.router.engine
    engine._scheduler.state.inventory.catalog.add_reference(snapshot(7).id, 0.0)
    capsys.readouterr()
    assert await run(kvferry, "purge", "--yes", "--id", "000007", "--id", "000008") == 0

    (line,) = [line for line in printed(capsys) if "purged" in line]
    assert line == ("2 snapshots, 15.0MiB, 215 tokens purged; 1 in use, to be deleted after use")
    assert await count(kvferry) == N - 2
    await run(kvferry, "purge", "--yes", "--all", "--json")
    assert json.loads("\n".join(printed(capsys)))["count"] == N - 2
    assert await count(kvferry) == 0
    await run(kvferry, "purge", "--all")
    assert capsys.readouterr().out == "0 snapshots purged\n"
