"""What of a command line decides KV: flags by their values, files by their content."""

from pathlib import Path

import pytest

from router.base.types import KvSettings
from router.servers.kv_settings import kv_settings

NOTHING = KvSettings()


@pytest.mark.parametrize(
    "args",
    [
        ["--rope-freq-base", "500000"],
        ["--override-kv", "llama.rope.scaling.factor=float:2"],
        ["--image-min-tokens", "16"],
        ["--control-vector-layer-range", "3", "9"],
    ],
)
def test_a_flag_that_decides_kv_counts_with_its_value(args: list[str]) -> None:
    given = kv_settings(["llama-server", *args, "-t", "2"], {})
    other = kv_settings(["llama-server", *args[:-1], "7", "-t", "2"], {})
    assert len({given, other, NOTHING}) == 3
    assert kv_settings(["llama-server", "-t", "4", *args], {}) == given


def test_other_flags_do_not_count() -> None:
    words = ["-c", "4096", "-np", "2", "-fa", "on", "-t", "3", "--temp", "0.5", "-m", "/m.gguf"]
    assert kv_settings(words, {"LLAMA_ARG_N_PARALLEL": "4"}) == NOTHING


def test_a_variable_counts_unless_the_flag_is_given() -> None:
    base = kv_settings(["--rope-freq-base", "7"], {})
    assert kv_settings([], {"LLAMA_ARG_ROPE_FREQ_BASE": "7"}) == base
    assert kv_settings(["--rope-freq-base", "7"], {"LLAMA_ARG_ROPE_FREQ_BASE": "8"}) == base
    assert kv_settings([], {"LLAMA_ARG_ROPE_FREQ_BASE": ""}) == NOTHING


def test_a_projector_counts_by_its_content(tmp_path: Path) -> None:
    for name, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (kv_settings(["-mm", str(tmp_path / name)], {}) for name in "abc")
    assert a == b != c
    assert a.flags == ""
    assert kv_settings([], {"LLAMA_ARG_MMPROJ": str(tmp_path / "c")}) == c


def test_a_vector_counts_by_its_content_and_scale(tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(b"one")
    args = ["--control-vector-scaled", f"{tmp_path / 'v'}:0.5"]
    first = kv_settings(args, {})
    assert kv_settings([args[0], f"{tmp_path / 'v'}:0.6"], {}) != first
    (tmp_path / "v").write_bytes(b"two")
    assert kv_settings(args, {}) != first


def test_a_file_in_a_container_counts_by_its_name() -> None:
    here = kv_settings(["--mmproj", "/nowhere/p.gguf"], {})
    assert here == kv_settings(["-mm", "/in/p.gguf"], {}) != NOTHING
