"""A real Prometheus, if there is one on PATH (Debian: `apt-get install prometheus`)."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from router.servers.program import HOST, free_port
from tests.support.paths import ROOT
from tests.support.servers.running_router import PATIENCE_S

SHIPPED = ROOT / "dashboards" / "prometheus"
_POLL_S = 0.05


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; skip the test if it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on PATH; Debian has it in the package prometheus")
    return found


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus, and a client for it."""

    url: str
    session: aiohttp.ClientSession

    async def _get(self, path: str, **params: str) -> Any:
        async with self.session.get(self.url + path, params=params) as response:
            answer = await response.json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def query(self, expr: str) -> list[float]:
        """Return the values that an instant query finds now, without NaN."""
        data = await self._get("/api/v1/query", query=expr)
        values = [float(found["value"][1]) for found in data["result"]]
        return [value for value in values if value == value]

    async def until(self, expr: str) -> None:
        """Wait until a query finds a value."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if await self.query(expr):
                    return
                await asyncio.sleep(_POLL_S)

    async def rules(self) -> dict[str, str]:
        """Return each rule's health by its name: `ok` if it could be evaluated."""
        groups = (await self._get("/api/v1/rules"))["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


@asynccontextmanager
async def prometheus(target: str, folder: Path) -> AsyncIterator[Prometheus]:
    """Run Prometheus as shipped, but for another target (`host:port`) and short intervals."""
    argv0 = program("prometheus")
    shipped = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    # A scrape longer than its timeout removes every series until the next.
    quick = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"}
    (scrape,) = shipped["scrape_configs"]
    del scrape["file_sd_configs"]
    scrape["static_configs"] = [{"targets": [target]}]
    rules = [str(SHIPPED / name) for name in shipped["rule_files"]]
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(shipped | {"global": quick, "rule_files": rules}))
    port = free_port()
    argv = [argv0, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    argv += [f"--web.listen-address={HOST}:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
    try:
        async with aiohttp.ClientSession() as session:
            made = Prometheus(f"http://{HOST}:{port}", session)
            await _ready(made, process)
            yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _ready(made: Prometheus, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            assert process.returncode is None, "prometheus ended; see prometheus.log"
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with made.session.get(made.url + "/-/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_POLL_S)
