"""Presets of llama-server's router mode as a configuration of kvferry."""

import pytest

from router.config.schema import Config, parse
from router.tools.serving.llama_swap import ImportProblemError
from router.tools.serving.models_ini import _words, imported

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


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("fit", "off", ["-fit", "off"]),
        ("reasoning", "on", ["--reasoning", "on"]),
        ("ngld", "99", ["-ngld", "99"]),
        ("rpc", "host:1", ["--rpc", "host:1"]),
        ("mmap", "0", ["--no-mmap"]),
        ("cont-batching", "1", ["--cont-batching"]),
        ("kvu", "off", ["--no-kv-unified"]),
        ("no-warmup", "1", ["--no-warmup"]),
        ("no-mmap", "false", ["--mmap"]),
        ("new-switch", "true", ["--new-switch"]),
        ("C", "0xff", ["-C", "0xff"]),
        ("temp", "0", ["--temp", "0"]),
    ],
)
def test_key_becomes_the_flag_that_it_is(key: str, value: str, words: list[str]) -> None:
    assert _words(key, value) == words
