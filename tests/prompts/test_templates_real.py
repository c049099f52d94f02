"""Public chat templates, rendered here and by a real llama-server.

Needs KVFERRY_TEST_VOCABS, llama.cpp's folder `models/`, which has them in `templates/`.
"""

import os
import random
from pathlib import Path

import orjson
import pytest

from router.base.errors import BackendRefusedError
from router.base.types import BackendId
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from router.prompts.chat_template import prove
from tests.conftest import StartServer

FOLDER = Path(os.environ.get("KVFERRY_TEST_VOCABS", "/nonexistent")) / "templates"
NAMES = sorted(path.name for path in FOLDER.glob("*.jinja"))
PIECES = (
    *("\u3000", "\u00a0", "\u2003", "\u2028", "\x1c", "\x1f", "\u0085", " ", "\n", "\t", "\v\f"),
    *("text", "Größe ß İ", "漢字", "🚢", "it's", "<think>", "</think>", "<|im_end|>", "[INST]"),
    *("<tool_call>", '{"a": 1}', "{{ 1 }}", "{% if %}", "\x00", "<b>", "&amp;", "/no_think", "\\n"),
)

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.mark.skipif(not NAMES, reason="KVFERRY_TEST_VOCABS names no folder with templates")
@pytest.mark.parametrize("name", NAMES)
async def test_a_template_that_is_used_renders_as_the_server_does(
    llama_server: StartServer, name: str
) -> None:
    server = await llama_server(
        "llama", slots=1, extra_args=["--jinja", "--chat-template-file", str(FOLDER / name)]
    )
    draw = random.Random(name)
    async with Connections() as connections:
        client = LlamaClient(BackendId("a"), server.url, connections, Timeouts())
        props = await client.props()
        template = await prove(
            props.chat_template, props.bos_token, props.eos_token, client.apply_template
        )
        if template is None:
            pytest.skip("the server renders it")
        n_here = 0
        for _ in range(40):
            roles = ["user", *["assistant", "user"] * draw.randrange(3)]
            if draw.random() < 0.5:
                roles.insert(0, "system")
            messages = [
                {"role": role, "content": "".join(draw.choices(PIECES, k=draw.randrange(1, 8)))}
                for role in roles
            ]
            ours = template.render({"messages": messages})
            if ours is None:
                continue
            n_here += 1
            try:
                theirs = await client.apply_template(orjson.dumps({"messages": messages}))
            except BackendRefusedError as error:
                pytest.fail(f"the server refuses {messages}: {error}")
            assert ours == theirs, messages
        assert n_here >= 10
