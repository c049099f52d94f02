"""`kvferry demo` with a tiny model: the facts in its table, and nothing left behind."""

import asyncio
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from router.tools.demo.conversation import SCRIPT
from router.tools.demo.demo import demo
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.thorough

ROW = re.compile(
    r"^ *(?P<number>\d+) (?P<what>\D.*?) +(?P<prompt>[\d,]+) +(?P<before>[\d,]+) +[\d.]+ "
    r"(?P<slot>[ab]/[01]) +(?P<source>[a-z]+) +(?P<resident>[\d,]+|-) +(?P<snapshot>[\d,]+|-)"
    r" +(?P<after>[\d,]+|-) +[\d.]+$"
)


def number(text: str) -> int:
    return 0 if text == "-" else int(text.replace(",", ""))


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the directory in which temporary directories are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def children(pid: int) -> list[str]:
    """Return the ids of the running processes that `pid` started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(status[1]) == pid and status[0] != "Z":
                found.append(entry.name)
    return found


async def test_table(
    server_argv: list[str], scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With kvferry far fewer tokens are computed; slots and snapshots both serve."""
    before = children(os.getpid())
    path = None if server_argv[0] == sys.executable else server_argv[0]

    assert await demo(tiny_model("llama").path, path, keep=False, reading_s=0.3) == 0

    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert max(len(line) for line in lines) <= 100
    rows = [found for line in lines if (found := ROW.match(line))]
    assert [row["what"] for row in rows] == [step.what for step in SCRIPT]
    for row in rows:
        parts = [number(row[part]) for part in ("resident", "snapshot", "after")]
        assert sum(parts) == number(row["prompt"])
    assert {row["source"] for row in rows} >= {"cold", "resident", "snapshot"}
    without, with_ = (sum(number(row[side]) for row in rows) for side in ("before", "after"))
    assert with_ < 0.6 * without
    # The busy slot, the crash and more people than slots cost next to nothing.
    for index in (4, 5, 6, 10, 11, 12):
        assert number(rows[index]["after"]) < 0.1 * number(rows[index]["prompt"])
    assert f"{with_:,} prompt tokens computed instead of {without:,}" in " ".join(lines)
    assert "with kvferry: 13/13" in printed.err
    assert os.listdir(scratch) == []
    assert children(os.getpid()) == before


@pytest.mark.slow
async def test_with_a_real_model(
    server_argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo runs with SmolLM2-135M-Instruct and real text, as in `make demo`."""
    path = None if server_argv[0] == sys.executable else server_argv[0]

    assert await demo(None, path, keep=False) == 0

    rows = [found for line in capsys.readouterr().out.splitlines() if (found := ROW.match(line))]
    without, with_ = (sum(number(row[side]) for row in rows) for side in ("before", "after"))
    assert len(rows) == len(SCRIPT)
    assert with_ < 0.7 * without


@pytest.mark.parametrize("until", ["without kvferry: 3/", "with kvferry: 4/", "Ctrl-C"])
async def test_interrupted(server_argv: list[str], scratch: Path, until: str) -> None:
    """Ctrl-C while requests run exits with 130, at the end of --keep with 0; nothing stays."""
    where = None if server_argv[0] == sys.executable else server_argv[0]
    command = (
        "import asyncio, pathlib, sys; from router.tools.demo.demo import demo; "
        f"model = pathlib.Path({str(tiny_model('llama').path)!r}); "
        f"sys.exit(asyncio.run(demo(model, {where!r}, keep=True, reading_s=0.1)))"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    text = b""
    while until.encode() not in text:
        line = await process.stdout.readline()
        assert line, text.decode()
        text += line
    started = children(process.pid)
    assert started

    process.send_signal(signal.SIGINT)
    await process.communicate()

    assert process.returncode == (0 if until == "Ctrl-C" else 130)
    assert os.listdir(scratch) == []
    assert set(started).isdisjoint(os.listdir("/proc"))


async def test_missing_parts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A missing file that the user named is reported."""
    model = tiny_model("llama").path
    assert await demo(tmp_path / "no.gguf", None, keep=False) == 1
    assert "there is no file" in capsys.readouterr().err
    assert await demo(model, "/no/llama-server", keep=False) == 1
    assert "not a program" in capsys.readouterr().err


async def test_broken_model(
    server_argv: list[str], scratch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the end of the server's log, which says why."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, but not really")
    path = None if server_argv[0] == sys.executable else server_argv[0]

    assert await demo(tmp_path / "bad.gguf", path, keep=False) == 1

    assert "could not be started" in capsys.readouterr().err
    assert os.listdir(scratch) == []


# --- parts ----------------------------------------------------------------------------------------
