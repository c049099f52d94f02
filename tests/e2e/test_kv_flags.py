"""Flags of llama-server that decide what its state files hold, and those that do not.

`docs/llama-server.md` section 1.8 has the table. A flag that changes the file has to make another
namespace, of a server whose command line is known.
"""

from hashlib import blake2b
from pathlib import Path

import gguf
import numpy as np
import pytest

from router.servers.kv_settings import kv_settings
from tests.conftest import StartServer
from tests.support.conversations.measuring import direct
from tests.support.conversations.prompts import ids

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def _binary(server_argv: list[str]) -> None:
    if "router.servers.prebuilt" in server_argv:
        pytest.skip("the prebuilt server takes few flags; KVFERRY_TEST_FLAVOUR=binary")


PROMPT = ids(1, 300)
YARN = ["--rope-scaling", "yarn", "--rope-scale", "2"]


def vector(home: Path) -> Path:
    """Write a control vector for the tiny llama model."""
    path = home / "vector.gguf"
    writer = gguf.GGUFWriter(str(path), "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", 3)
    for layer in (1, 2, 3):
        writer.add_tensor(f"direction.{layer}", np.full(128, 0.5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


async def saved(llama_server: StartServer, flags: list[str]) -> str:
    """Return a digest of the state file that a server with these flags writes."""
    server = await llama_server("llama", slots=1, ctx=4096, extra_args=flags)
    async with direct(server) as client:
        for path, body in (
            ("/completion", {"prompt": PROMPT, "n_predict": 0}),
            ("/slots/0?action=save", {"filename": "state"}),
        ):
            assert (await client.post(path, body)).status == 200
    await server.stop()
    assert server.kv_dir is not None
    return blake2b((server.kv_dir / "state").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "flags",
    [
        ["--rope-freq-base", "5000"],
        ["--rope-freq-scale", "0.5"],
        ["--rope-scale", "2"],
        YARN,
        [*YARN, "--yarn-orig-ctx", "256"],
        [*YARN, "--yarn-ext-factor", "0.5"],
        ["--yarn-attn-factor", "2"],  # with YaRN it is ignored (llama-context.cpp:205)
        [*YARN, "--yarn-beta-slow", "4"],
        [*YARN, "--yarn-beta-fast", "8"],
        ["--override-kv", "llama.rope.freq_base=float:5000"],
        ["--control-vector", "VECTOR"],
        ["--control-vector-scaled", "VECTOR:0.5"],
        ["--control-vector", "VECTOR", "--control-vector-layer-range", "1", "2"],
    ],
    ids=lambda flags: " ".join(flags[-2:]),
)
async def test_it_changes_the_state_and_its_name(
    llama_server: StartServer, tmp_path: Path, flags: list[str]
) -> None:
    at = str(vector(tmp_path))
    flags = [word.replace("VECTOR", at) for word in flags]
    plain = YARN if flags[: len(YARN)] == YARN and flags != YARN else []
    assert await saved(llama_server, flags) != await saved(llama_server, plain)
    assert kv_settings(flags, {}).flags != kv_settings(plain, {}).flags


@pytest.mark.parametrize(
    "flags",
    [
        ["--keep", "8"],
        ["-c", "2048"],
        ["--temp", "0.3", "--top-k", "5", "-s", "7"],
        ["--ctx-checkpoints", "2"],
        ["--swa-full"],
        ["--no-warmup"],
        ["--no-kv-offload"],
        ["-sps", "0.5"],
        ["--chat-template", "chatml", "--no-jinja"],
        ["--reverse-prompt", "x"],
        ["--spm-infill"],
        ["--poll", "0"],
        ["--no-host"],
        ["--yarn-beta-slow", "4"],
    ],
    ids=" ".join,
)
async def test_it_leaves_the_state_as_it_is(llama_server: StartServer, flags: list[str]) -> None:
    assert await saved(llama_server, flags) == await saved(llama_server, [])
