"""Memory of GPUs, as the tools of their vendors tell it."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from router.telemetry.gpus import Gpu, Gpus, amd_gpus, nvidia_gpus

MIB = 1024**2
AMD = b"""{"card0": {"VRAM Total Memory (B)": "17163091968", "VRAM Total Used Memory (B)": "8192",
"Card Series": "Radeon RX 7900"}, "card1": {"VRAM Total Memory (B)": "N/A"}, "system": {}}"""


def test_lines_of_nvidia_smi_are_read() -> None:
    told = b"0, NVIDIA H100 80GB HBM3, 1024, 81559\n1, NVIDIA A10G, [N/A], 23028\n\nrubbish\n"
    assert nvidia_gpus(told) == [Gpu("0", "NVIDIA H100 80GB HBM3", 1024 * MIB, 81559 * MIB)]


def test_json_of_rocm_smi_is_read() -> None:
    assert amd_gpus(AMD) == [Gpu("0", "Radeon RX 7900", 8192, 17163091968)]


@pytest.mark.parametrize("told", [b"", b"[]", b"{", b"null", b'{"card0": 3}', b"\xff,1,2,3"])
def test_rubbish_is_no_gpu(told: bytes) -> None:
    assert (nvidia_gpus(told), amd_gpus(told)) == ([], [])


@pytest.mark.parametrize(
    ("script", "found"), [("echo '0, Fake, 1, 4'", 1), ("exit 9", 0), ("echo 'No devices'", 0)]
)
async def test_tool_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: int
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    registry = CollectorRegistry()
    gpus = Gpus(registry)
    await gpus.ask()
    assert len(gpus.found) == found
    used = registry.get_sample_value("kvferry_gpu_memory_used_bytes", {"gpu": "0", "name": "Fake"})
    assert used == (MIB if found else None)
