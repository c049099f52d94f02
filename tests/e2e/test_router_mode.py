"""llama-server in router mode: without a model, it starts a server for each of several.

kvferry refuses such a server and reports what to do instead, for the reasons in
docs/llama-server.md section 5.8. The gravest one is tested here: if it has changed, the refusal may
go.
"""

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from router.config.schema import from_flags
from router.tools.doctor.command import doctor
from tests.conftest import START_TIMEOUT_S
from tests.support.conversations.prompts import Json, chat
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

ADVICE = "start one llama-server for each model"


class Parent(LlamaServer):
    """A llama-server in router mode; `model` is a directory of models."""

    def command(self) -> list[str]:
        command = super().command()
        command[command.index("-m")] = "--models-dir"
        return command

    def children(self) -> list[int]:
        """Return the process ids of the servers that this one started."""
        found = subprocess.run(
            ["ps", "--ppid", str(self.pid), "-o", "pid="],
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(pid) for pid in found.stdout.split()]


@pytest.fixture
async def parent(server_argv: list[str], tmp_path: Path) -> AsyncIterator[Parent]:
    if "router.servers.prebuilt" in server_argv:
        pytest.skip("the prebuilt server always has a model; KVFERRY_TEST_FLAVOUR=binary")
    models = tmp_path / "models"
    models.mkdir()
    for name in ("one", "two"):
        (models / f"{name}.gguf").symlink_to(tiny_model("llama").path)
    server = Parent(models, argv=server_argv, ctx=65536, start_timeout_s=START_TIMEOUT_S)
    async with server:
        yield server


async def load(parent: Parent, session: aiohttp.ClientSession) -> None:
    """Load a model: any request loads the one that its body names."""
    body: Json = {"content": "hi", "model": "one"}
    async with session.post(parent.url + "/tokenize", json=body) as response:
        assert response.status == 200


async def test_it_is_refused(parent: Parent, capsys: pytest.CaptureFixture[str]) -> None:
    """The router and `kvferry doctor` refuse such a server, with a model loaded and without one."""
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            async with running([("a", parent.url)], None, wait_for=[]) as kvferry:
                state = await kvferry.until(lambda state: ADVICE in state["backends"][0]["problem"])
                assert not state["backends"][0]["up"]
            assert await doctor(from_flags([parent.url], None)) == 1
            said = " ".join(capsys.readouterr().out.split())
            assert "it runs in router mode" in said
            assert ADVICE in said
            await load(parent, session)


async def test_half_an_answer_looks_like_a_whole_one(parent: Parent) -> None:
    """The parent ends the stream of a killed child as if it were complete."""
    body: Json = {"messages": chat(1, "Hello!", length=1), "model": "one", "max_tokens": 60_000}
    async with aiohttp.ClientSession() as session:
        await load(parent, session)
        (child,) = parent.children()
        async with session.post(
            parent.url + "/v1/chat/completions", json=body | {"stream": True, "ignore_eos": True}
        ) as response:
            await response.content.readany()
            os.kill(child, 9)
            rest = await response.read()  # raises nothing
        assert b"[DONE]" not in rest
        assert rest.endswith(b"proxy error: Failed to read connection")
