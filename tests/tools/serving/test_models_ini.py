"""Presets of llama-server's router mode as a configuration of kvferry."""

import pytest

from router.config.schema import Config, parse
from router.tools.serving.llama_swap import ImportProblemError
from router.tools.serving.models_ini import imported

PRESETS = """version = 1

[*]
c = 8192
n-gpu-layers = 99  ; all of them
flash-attn = on

[ggml-org/small-GGUF:Q8_0]
load-on-startup = true
LLAMA_ARG_CACHE_RAM = 0

[chat]
model = /models/chat.gguf
c = 16384
np = 2
mmap = false
jinja = true
stop-timeout = 5
"""


def test_presets_become_models() -> None:
    config: Config = parse(imported(PRESETS), "x")
    small, chat = config.servers.models

    assert small.names == ("ggml-org-small-GGUF-Q8_0", "ggml-org/small-GGUF:Q8_0")
    assert (small.hf, small.preload, small.ctx) == ("ggml-org/small-GGUF:Q8_0", True, 8192)
    assert small.env == {"LLAMA_ARG_CACHE_RAM": "0"}
    assert small.args == ("--n-gpu-layers", "99", "--flash-attn", "on")
    assert (str(chat.model), chat.slots, chat.ctx) == ("/models/chat.gguf", 2, 8192)
    assert {"--no-mmap", "--jinja", "--n-gpu-layers"} <= set(chat.args)
    assert not chat.preload
    assert config.servers.loaded == 1


@pytest.mark.parametrize("text", ["", "version = 1", "no ini"])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(ImportProblemError, match=r"no section|no file of presets"):
        imported(text)
