"""What `pip` installs from the wheel and from the sdist, in an environment of its own."""

import asyncio
import json
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def run(*command: str | Path, cwd: Path) -> str:
    """Run a command in `cwd`, which is not the checkout; return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()[-4000:]
    return printed.decode()


async def built(tmp_path: Path, kind: str) -> Path:
    """Build a wheel or an sdist from a copy of what git has; return its file."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    await run("git", "-C", ROOT, "archive", "-o", tmp_path / "head.tar", "HEAD", cwd=tmp_path)
    with tarfile.open(tmp_path / "head.tar") as archive:
        archive.extractall(source, filter="data")
    if kind == "wheel":
        wheel = ("-m", "pip", "wheel", "-q", "--no-deps", "-w", out, source)
        await run(sys.executable, *wheel, cwd=tmp_path)
    else:
        out.mkdir()
        build = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
        await asyncio.to_thread(venv.create, tmp_path / "build", with_pip=True)
        python = tmp_path / "build" / "bin" / "python"
        await run(python, "-m", "pip", "install", "-q", "setuptools>=77", cwd=tmp_path)
        await run(python, "-c", build, cwd=source)
    (made,) = out.iterdir()
    return made


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
async def test_package_works_by_itself(tmp_path: Path, kind: str) -> None:
    """Its commands run, and the files that are no Python came along."""
    package = await built(tmp_path, kind)
    await asyncio.to_thread(venv.create, tmp_path / "env", with_pip=True)
    scripts = tmp_path / "env" / "bin"
    await run(scripts / "python", "-m", "pip", "install", "-q", package, cwd=tmp_path)
    kvferry = scripts / "kvferry"

    assert "kvferry 0." in await run(kvferry, "--version", cwd=tmp_path)
    assert json.loads(await run(kvferry, "schema", cwd=tmp_path))["properties"]["backends"]
    assert "complete" in await run(kvferry, "completion", "bash", cwd=tmp_path)
    (tmp_path / "kvferry.yaml").write_text("backends: [{url: 'http://127.0.0.1:1'}]\n")
    assert "OK" in await run(kvferry, "check", "kvferry.yaml", cwd=tmp_path)
    assert (tmp_path / "env" / "share" / "man" / "man1" / "kvferry.1").is_file()
    page = "from router.web.admin.page import load_page; print(sorted(load_page()))"
    assert "page.js" in await run(scripts / "python", "-c", page, cwd=tmp_path)


@pytest.mark.parametrize("tool", ["uv", "pipx"])
async def test_package_is_a_tool(
    tmp_path: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`uv tool install` and `pipx install` put the command on the PATH."""
    package, bin_dir = await built(tmp_path, "wheel"), tmp_path / "bin"
    await asyncio.to_thread(venv.create, tmp_path / "env", with_pip=True)
    scripts = tmp_path / "env" / "bin"
    await run(scripts / "python", "-m", "pip", "install", "-q", tool, cwd=tmp_path)
    for name in ("UV_TOOL_BIN_DIR", "PIPX_BIN_DIR"):
        monkeypatch.setenv(name, str(bin_dir))
    for name in ("UV_TOOL_DIR", "PIPX_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "tools"))
    monkeypatch.setenv("PIPX_MAN_DIR", str(tmp_path / "man"))
    monkeypatch.setenv("UV_PYTHON", sys.executable)
    install = ("tool", "install") if tool == "uv" else ("install",)
    await run(scripts / tool, *install, package, cwd=tmp_path)
    assert "kvferry 0." in await run(bin_dir / "kvferry", "--version", cwd=tmp_path)
