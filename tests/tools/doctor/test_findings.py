"""Conclusions of `kvferry doctor`: findings with remedies, the exit code, the last line."""

import dataclasses
import os
import sys

import pytest
from msgspec.structs import replace

from router.base.types import BackendId, BackendInfo, KvDir, MemoryKind, Namespace
from router.config.schema import BackendConfig, Config, from_flags, parse
from router.llama.attach.diagnosis import Trouble, Unusable
from router.llama.attach.learning import Attached
from router.llama.attach.probe_result import MOVES_CHUNKS, NO_KV, SWA_FULL, Padding, ProbeResult
from router.llama.replies import ModelsInfo, Props
from router.store.format.layout import Layout
from router.tools.doctor.facts import Facts, Folder, SavedFile, Words
from router.tools.doctor.findings import Finding, Level, of_backend, restores
from router.tools.doctor.together import of_several, verdict

GOOD = Facts(
    BackendConfig.model_validate({"url": "http://127.0.0.1:8081", "name": "one", "kv_dir": "/kv"}),
    folder=Folder(True, 0o700, os.geteuid(), True, (1, 1)),
    saved=SavedFile(0o600, os.geteuid()),
    words=Words(12, None, None),
    props=Props(
        total_slots=2,
        n_ctx=4096,
        model_path="/models/small.gguf",
        model_alias="",
        chat_template="",
        media_marker="<m1>",
        build_info="b11434-abc",
        bos_token="",
        eos_token="",
        has_vision=False,
        has_audio=False,
        endpoint_slots=True,
        is_sleeping=False,
    ),
)
MODELS = ModelsInfo(frozenset({"small"}), 512, 8192, 64, 135_000_000, 98_000_000, "Q4_1", "t")
INFO = BackendInfo(
    BackendId("one"), 2, 4096, Namespace("n"), kv_dir=KvDir("/kv"), memory_kind=MemoryKind.FULL
)
PROBE = ProbeResult(
    memory_kind=MemoryKind.FULL,
    layout=Layout(blocks=()),
    n_tokens=100,
    prefill_s=0.1,
    save_s=0.003,
    restore_s=0.002,
    size_bytes=2_300_000,
    can_save=True,
    restored_extension=100,
    restored_divergence=50,
    cuts=True,
)


class _Full(Layout):
    """The layout of a full-attention state, without its bytes."""

    memory_kind = MemoryKind.FULL
    n_stream = 2
    is_opaque = False

    def __init__(self) -> None:
        super().__init__(blocks=())

    def fingerprint(self) -> str:
        return "same"


class _Windowed(_Full):
    memory_kind = MemoryKind.SLIDING_WINDOW


class _Hybrid(_Full):
    memory_kind = MemoryKind.HYBRID


class _Unified(_Full):
    n_stream = 1


class _NoAttention(_Full):
    memory_kind = MemoryKind.RECURRENT
    n_stream = 0


WINDOWED: dict[str, object] = {
    "layout": _Windowed(),
    "memory_kind": MemoryKind.SLIDING_WINDOW,
    "restored_divergence": 0,
    "window": 64,
    "padded": Padding.WORKS,
    "cuts": False,
}


def facts(name: str = "one", /, **changes: object) -> Facts:
    """Return the facts of a backend with nothing wrong, except for `changes` of its parts."""

    def of(kind: type) -> dict[str, object]:
        return {key: changes.pop(key) for key in list(changes) if key in kind.__annotations__}

    own = of(Facts)
    assert GOOD.props is not None
    props = dataclasses.replace(GOOD.props, **of(Props))  # type: ignore[arg-type]
    probe = dataclasses.replace(PROBE, **({"layout": _Full()} | of(ProbeResult)))  # type: ignore[arg-type]
    seen = {"memory_kind": probe.memory_kind, "keeps_idle_slots": probe.keeps_idle_slots}
    info = replace(INFO, **(seen | of(BackendInfo)))
    models = dataclasses.replace(MODELS, **of(ModelsInfo))  # type: ignore[arg-type]
    backend = GOOD.backend.model_copy(update={"name": BackendId(name)})
    attached = Attached(info, (), props, models, probe, **of(Attached))  # type: ignore[arg-type]
    assert not changes
    made = dataclasses.replace(GOOD, backend=backend, props=props, attached=attached)
    return dataclasses.replace(made, **own)  # type: ignore[arg-type]


def bad(found: list[Finding]) -> list[Finding]:
    """Return the findings that ask for a change."""
    return [finding for finding in found if finding.level in (Level.WARNING, Level.ERROR)]


def config(*, policy: str | None = None, **keys: object) -> Config:
    made = from_flags(["http://127.0.0.1:8081"], "/kv", None, policy)
    return made.model_copy(update=keys)


# --- findings -------------------------------------------------------------------------------------


def test_nothing_wrong() -> None:
    found = of_backend(facts())

    assert bad(found) == []
    said = " ".join(finding.what for finding in found)
    for fact in ("b11434", "small.gguf", "135 M", "2 slots of 4,096", "100/100", "50/50"):
        assert fact in said
    assert "prefill 1,000 tokens/s, save 3.0 ms, restore 2.0 ms for 100 tokens (2.3 MB)" in said
    assert verdict([facts()], config()) == (0, "Ready: every backend can save and restore KV.")


def test_a_model_for_embeddings_has_nothing_to_save() -> None:
    changed = {"generates": False, "layout": None, "can_save": False, "note": NO_KV}
    found = of_backend(facts(**changed))

    assert bad(found) == []
    assert Finding(Level.NOTE, NO_KV) in found


@pytest.mark.parametrize(
    ("changed", "what", "do"),
    [
        ({"actions": False}, "without --slot-save-path", "--slot-save-path /kv"),
        ({"folder": None}, "no kv_dir", "--kv-dir DIR"),
        ({"folder": Folder()}, "not a directory", "mkdir -m 700 /kv"),
        ({"folder": Folder(True, 0o700, 12345, False)}, "owned by uid 12345", "same user"),
        ({"folder": Folder(True, 0o755, 0, True)}, "all users (mode 755)", "chmod 700 /kv"),
        ({"folder": Folder(True, 0o750, 0, True)}, "its group (mode 750)", "chmod 700 /kv"),
        (
            {"folder": Folder(True, 0o775, 0, True, group_access=True)},
            "all users (mode 775)",
            "chmod 770 /kv",
        ),
        ({"unseen": "kvf-1.part"}, "kvf-1.part was left", "--slot-save-path /kv"),
        ({"untried": "every slot is busy"}, "every slot is busy", "try again"),
        ({"can_save": False, "problem": "disk full"}, "disk full", "log"),
        ({"layout": None, "saved": SavedFile(0o600, 12345)}, "belongs to uid 12345", "same user"),
        ({"layout": None, "problem": "5 bytes are there"}, "5 bytes are there", "free space"),
        ({"restored_extension": 0, "problem": "it gives no cached tokens"}, "0/100", "log"),
        ({"problem": SWA_FULL, "memory_kind": MemoryKind.UNKNOWN}, "wrong answers", "--swa-full"),
        ({"problem": MOVES_CHUNKS}, "shifts KV inside slots", "restart it without --cache-reuse"),
        (
            {"problem": "odd", "memory_kind": MemoryKind.UNKNOWN},
            "odd (tokens reused after a restore: ",
            "newer",
        ),
        ({"keeps_idle_slots": False}, "idle slots", "restart it with --cache-ram 0"),
        ({"ram_cache": True}, "one tenant's prompts to another", "--cache-ram 0"),
        ({"endpoint_slots": False}, "what its slots do", "without --no-slots"),
        ({"is_sleeping": True}, "asleep", "without --sleep-idle-seconds"),
        ({"speculative": True}, "speculative", "-md"),
        ({"words": Words(3, None, False)}, "local tokenizer is not used", "tokenizer.path"),
    ],
)
def test_what_is_wrong_and_what_to_do(changed: dict[str, object], what: str, do: str) -> None:
    found = bad(of_backend(facts(**changed)))

    assert [(what in f.what, do in f.do) for f in found] == [(True, True)], found


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (
            {"layout": _Hybrid(), "memory_kind": MemoryKind.HYBRID, "restored_divergence": 0},
            "hybrid model (tokens reused after a restore: 100/100 if the prompt continues,"
            " 0/50 if it diverges)",
        ),
        (
            WINDOWED | {"padded": Padding.NEEDED, "note": "longer than 278 tokens", "window": 0},
            "longer than 278 tokens",
        ),
        ({"cuts": False, "note": "no prefix can be cut out"}, "no prefix can be cut out"),
        ({"layout": _Unified()}, "share 4,096 tokens"),
        ({"has_vision": True}, "vision"),
        ({"words": Words(0, "no special token", None)}, "tokenized whole"),
    ],
)
def test_notes(changed: dict[str, object], what: str) -> None:
    """A note is true, but asks for no change."""
    found = of_backend(facts(**changed))

    assert bad(found) == []
    assert [what in f.what for f in found if f.level is Level.NOTE] == [True]


def test_sliding_window() -> None:
    found = of_backend(facts(**WINDOWED))

    assert bad(found) == []
    assert any("window attention of 64 tokens" in f.what and "padded" in f.what for f in found)
    assert restores(facts(**WINDOWED))


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        (_Full(), "2 streams, 4 bytes a token"),
        (_Unified(), "1 stream, 4 bytes a token"),
        (_NoAttention(), "no attention"),
    ],
)
def test_state_files(layout: Layout, what: str) -> None:
    assert what in " ".join(f.what for f in of_backend(facts(layout=layout)))


@pytest.mark.parametrize("trouble", Trouble)
def test_every_trouble_has_an_advice(trouble: Trouble) -> None:
    broken = dataclasses.replace(GOOD, unusable=Unusable(trouble, "why"))

    (found,) = of_backend(broken)

    assert found.level is Level.ERROR
    assert f"{trouble} (why)" in found.what
    assert found.do
    assert verdict([broken, facts()], config())[0] == 1


def test_exit_code_follows_the_policy() -> None:
    """A fleet that cannot restore is fine for a policy that never restores."""
    unable = facts(actions=False, kv_dir=None)

    assert not restores(unable)
    assert verdict([unable], config())[0] == 1
    assert verdict([unable], config(policy="round_robin"))[0] == 0
    code, text = verdict([facts(), facts("two", kv_dir=None)], config())
    assert (code, text) == (0, "Ready, but only one can restore KV; see above.")


@pytest.mark.parametrize("mode", [0o755, 0o750])
def test_a_directory_that_serve_refuses(mode: int) -> None:
    """The doctor once reported an error, and then "Ready"."""
    folder = dataclasses.replace(GOOD.folder or Folder(), mode=mode)
    fleet = [facts(folder=folder), facts("two")]

    code, text = verdict(fleet, config())

    assert (code, text) == (1, "Not ready: `kvferry serve` refuses kv_dir of one; see above.")
    # The directory does not matter where nothing is saved.
    assert verdict(fleet, config(policy="round_robin"))[0] == 0
    if mode == 0o750:
        shared = dataclasses.replace(folder, group_access=True)
        assert verdict([facts(folder=shared)], config())[0] == 0


STARTING = """
backends: [{url: "http://127.0.0.1:8081", name: one, kv_dir: /kv, api_key_env: KVFERRY_TEST_A}]
admin: {token_env: KVFERRY_TEST_T}
tracing: {endpoint: "http://127.0.0.1:4318"}
tls: {certificate: /nowhere/a.pem, key: /nowhere/a.key}
"""


def test_what_serve_needs_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor once said "Ready" of a router that does not start.

    A backend's key is reported with the backend.
    """
    monkeypatch.delenv("KVFERRY_TEST_T", raising=False)
    monkeypatch.setitem(sys.modules, "router.telemetry.tracing", None)
    wanted = parse(STARTING, "test")

    found = [f for f in of_several([facts()], wanted) if f.level is Level.ERROR]

    keys = ["admin.token_env", "tracing.endpoint", "tls.certificate"]
    assert [f.what.partition(":")[0] for f in found] == keys
    assert "KVFERRY_TEST_T, which is not set" in found[0].what
    assert "kvferry[otel]" in found[1].what
    assert "/nowhere/a.pem cannot be read" in found[2].what
    code, text = verdict([facts()], wanted)
    assert code == 1
    assert "refuses admin.token_env, tracing.endpoint and tls.certificate" in text


# --- between backends -----------------------------------------------------------------------------


def test_one_server_under_two_urls() -> None:
    (found,) = bad(of_several([facts(), facts("two")], config()))
    assert "one and the same server" in found.what

    old = {"media_marker": "<__media__>"}  # of older servers: equal in all of them
    assert bad(of_several([facts(**old), facts("two", **old)], config())) == []


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"model_path": "C:\\models\\big.gguf"}, "different model files (small.gguf, big.gguf)"),
        ({"n_params": 7}, "different models, although both files are named small.gguf"),
        ({"lora": b"[1]"}, "different LoRA adapters"),
        ({"layout": None}, "no state file of two could be read"),
        ({}, "predict different tokens"),
    ],
)
def test_why_not_the_same_namespace(changed: dict[str, object], what: str) -> None:
    other = facts("two", media_marker="<m2>", namespace=Namespace("other"), **changed)

    (found,) = of_several([facts(), other], config())

    assert found.what.startswith("two cannot use the KV of one: ")
    assert what in found.what
    assert found.do


def test_streams() -> None:
    """Different streams are no obstacle any more, but cost work."""
    other = facts("two", media_marker="<m2>", n_stream=2)
    found = of_several([facts(), other], config())

    assert [f.level for f in found] == [Level.OK, Level.NOTE]
    assert "1 (one), 2 (two)" in found[1].what
    assert "--kv-unified" in found[1].do


def test_directories() -> None:
    """Files are linked between two directories, and copied from one device to another."""
    for device, word in ((1, "linked"), (2, "copied")):
        folder = Folder(True, 0o700, 0, True, (device, 2))
        other = facts("two", media_marker="<m2>", folder=folder)
        assert f"states are {word} between" in of_several([facts(), other], config())[-1].what


def test_settings_without_effect() -> None:
    text = """
    backends: [{url: "http://127.0.0.1:8081", kv_dir: /kv}]
    store: {max_bytes: 0}
    probe: {enabled: false}
    tokenizer: {mode: off}
    """
    said = " ".join(f.what for f in of_several([facts()], parse(text, "test")))

    for key in ("store is off", "probe.enabled", "tokenizer.mode"):
        assert key in said
