"""Memory of the GPUs of this machine, as `nvidia-smi` or `rocm-smi` tells it; none without them."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.base.decoding import UndecodableError, json_of

_EVERY_S = 10.0
_LONGEST_S = 5.0  # a driver in trouble lets its tool hang
_MIB = 1024**2
_NVIDIA = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.used,memory.total",
    "--format=csv,noheader,nounits",
)
_AMD = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json")


class Gpu(Struct, frozen=True):
    """One GPU: its number, its product name, and its memory in bytes."""

    index: str
    name: str
    used_bytes: int
    total_bytes: int


class Gpus(Collector):
    """The GPUs, asked for again and again. Registers itself. Supervise `watch`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.found: list[Gpu] = []
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the memory, at most ten seconds old; nothing without a GPU."""
        labels = ["gpu", "name"]
        used = GaugeMetricFamily(
            "kvferry_gpu_memory_used_bytes", "Memory in use on a GPU, by all", labels=labels
        )
        total = GaugeMetricFamily(
            "kvferry_gpu_memory_total_bytes", "Memory of a GPU", labels=labels
        )
        for gpu in self.found:
            used.add_metric([gpu.index, gpu.name], gpu.used_bytes)
            total.add_metric([gpu.index, gpu.name], gpu.total_bytes)
        yield from (used, total)

    async def watch(self) -> None:
        """Ask every ten seconds, forever; once, if this machine has neither tool."""
        while await asyncio.to_thread(_has_a_tool):
            await self.ask()
            await asyncio.sleep(_EVERY_S)
        await asyncio.Event().wait()

    async def ask(self) -> None:
        """Ask once. What cannot be read is no GPU."""
        self.found = await asyncio.to_thread(_gpus)


def _has_a_tool() -> bool:
    return any(shutil.which(command[0]) for command in (_NVIDIA, _AMD))


def _gpus() -> list[Gpu]:
    return nvidia_gpus(_told(_NVIDIA)) or amd_gpus(_told(_AMD))


def _told(command: Sequence[str]) -> bytes:
    """Return what a tool prints; nothing if it fails, is missing or hangs. Blocking."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(  # noqa: S603 - one of our two commands
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LONGEST_S,
        ).stdout
    return b""


def nvidia_gpus(told: bytes) -> list[Gpu]:
    """Return the GPUs in lines such as `0, NVIDIA H100, 1024, 81559` (MiB)."""
    found = []
    for line in told.decode(errors="replace").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and all(fields[at].isdecimal() for at in (0, 2, 3)):
            used, total = int(fields[2]) * _MIB, int(fields[3]) * _MIB
            found.append(Gpu(fields[0], fields[1], used, total))
    return found


def amd_gpus(told: bytes) -> list[Gpu]:
    """Return the GPUs in an object such as `{"card0": {"VRAM Total Memory (B)": "1", ...}}`."""
    try:
        cards = json_of(told)
    except UndecodableError:
        return []
    found = []
    for name, card in cards.items() if isinstance(cards, dict) else ():
        if not (isinstance(card, dict) and name.startswith("card")):
            continue
        used = str(card.get("VRAM Total Used Memory (B)", ""))
        total = str(card.get("VRAM Total Memory (B)", ""))
        if used.isdecimal() and total.isdecimal():
            product = str(card.get("Card Series") or card.get("Card series") or "AMD")
            found.append(Gpu(name.removeprefix("card"), product, int(used), int(total)))
    return found
