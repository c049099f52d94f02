"""Configuration: valid files load, invalid ones are explained, the reference cannot drift."""

import re
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from router.config import schema, values
from router.config.loader import keys_of, path_text, read_yaml
from router.config.schema import (
    Address,
    BackendConfig,
    Config,
    ConfigError,
    PolicyName,
    TokenizerMode,
)
from router.config.servers import GroupConfig, ModelConfig
from router.config.values import AUTO
from router.core.model.policy import Policy as Preset
from router.tools.doctor import check
from tests.support.paths import ROOT

CONFIG_DIR = ROOT / "config"
REFERENCE = CONFIG_DIR / "kvferry.reference.yaml"
MINIMAL = "backends:\n  - url: http://127.0.0.1:8081\n"  # two lines: appended text starts on line 3


def problems(text: str) -> list[tuple[str, int | None, str]]:
    """Return all problems of `text` as (path, line, message)."""
    with pytest.raises(ConfigError) as caught:
        schema.parse(text, "test.yaml")
    assert caught.value.problems
    return [(p.path, p.line, p.message) for p in caught.value.problems]


def minimal(more: str = "") -> Config:
    return schema.parse(MINIMAL + more, "test.yaml")


# The files in config/


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("*.y*ml")), ids=lambda path: path.name)
def test_every_file_in_the_folder_loads(path: Path) -> None:
    status, text = check.check_text(path)

    assert (status, text[:4]) == (0, "OK: ")


def test_the_two_files_are_there() -> None:
    """Needed because the test above passes for an empty folder."""
    assert {"kvferry.example.yaml", "kvferry.reference.yaml"} <= {
        path.name for path in CONFIG_DIR.iterdir()
    }


def test_the_reference_has_every_key_and_no_other() -> None:
    document = read_yaml(REFERENCE.read_text(), "reference").value

    def compare(model: type[BaseModel], written: Any, path: str) -> None:
        assert set(keys_of(model)) == set(written), path
        for key, below in keys_of(model).items():
            for child in written[key] if isinstance(written[key], list) else [written[key]]:
                if below is not None:
                    compare(below, child, f"{path}.{key}")

    compare(Config, document, "")


def test_the_reference_shows_the_defaults() -> None:
    written = schema.load(REFERENCE)

    lists: dict[str, bool | set[str]] = {"backends": True, "servers": {"models", "groups"}}
    assert minimal().model_dump(exclude=lists) == written.model_dump(exclude=lists)
    assert minimal().backends[0] == written.backends[0]
    given = {"name": "chat", "model": "/models/chat-8b-q4_k_m.gguf"}
    assert ModelConfig.model_validate(given) == written.servers.models[0]
    assert GroupConfig.model_validate({"name": "gpu0"}) == written.servers.groups[0]


def test_the_reference_explains_every_key() -> None:
    """Keys have a comment right above, or begin a section that has one."""
    lines = REFERENCE.read_text().split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("  - url: https"))
    second = [*range(first, lines.index("", first))]
    first = lines.index("    - name: code")
    second += range(first, lines.index("", first))
    for i, line in enumerate(lines):
        if re.match(r"[ -]*[a-z_]+:", line) and i not in second:
            assert lines[i - 1].strip().startswith("#"), f"line {i + 1}: {line}"


@pytest.mark.parametrize(
    "kind", [PolicyName, TokenizerMode, schema.LogLevel, schema.LogFormat], ids=lambda k: k.__name__
)
def test_the_reference_names_every_choice(kind: type[StrEnum]) -> None:
    comments = "\n".join(
        line for line in REFERENCE.read_text().split("\n") if line.strip().startswith("#")
    )
    for member in kind:
        assert re.search(rf"\b{member.value}\b", comments), member


def test_the_planner_has_the_same_defaults() -> None:
    default, preset = minimal(), Preset()

    assert preset.name == default.policy.name
    assert preset.max_wait_s == default.policy.max_wait_s
    assert preset.coalesce_above_s == default.policy.coalesce_above_s
    assert preset.prefill_chunk_s == default.policy.prefill_chunk_s
    assert preset.reuse_probability == default.policy.reuse_probability
    assert default.store.idle_save_after_s == AUTO


# Valid files


def test_section_with_only_comments_has_its_defaults() -> None:
    assert minimal() == minimal("store:\n  # max_bytes: 1GiB\npolicy:\n")


def test_policy_as_a_word() -> None:
    assert minimal("policy: {name: cheapest}") == minimal("policy: cheapest")
    assert PolicyName.CHEAPEST is minimal("policy: cheapest").policy.name


def test_off_is_a_word() -> None:
    """PyYAML reads `off` as false, as YAML 1.1 has it."""
    text = """
queue: {deadline: off}
policy: {coalesce_above: off, prefill_chunk: off}
store: {idle_save_after: off, max_bytes: 0}
tokenizer: {mode: off}
"""
    parsed = minimal(text)

    assert parsed.queue.deadline_s is None
    assert parsed.policy.coalesce_above_s is None
    assert parsed.policy.prefill_chunk_s is None
    assert parsed.store.idle_save_after_s is None
    assert TokenizerMode.OFF is parsed.tokenizer.mode
    assert not parsed.store.enabled


def test_no_limits() -> None:
    store = minimal("store: {max_bytes: -1, max_tokens: -1}").store

    assert (store.max_bytes, store.max_tokens, store.enabled) == (-1, -1, True)
    assert not minimal("store: {max_tokens: 0}").store.enabled


def test_backends_on_two_hosts_may_share_a_directory() -> None:
    text = "backends:\n- {url: 'http://a:1', kv_dir: /kv}\n- {url: 'http://b:1', kv_dir: /kv/}\n"
    first, second = schema.parse(text, "test.yaml").backends

    assert Path("/kv") == first.kv_dir == second.kv_dir


def test_a_byte_order_mark_is_no_key() -> None:
    assert minimal() == schema.parse("\ufeff" + MINIMAL, "test.yaml")


@pytest.mark.parametrize(
    ("url", "normal", "name"),
    [
        ("http://GPU0:8081/", "http://gpu0:8081", "gpu0-8081"),
        ("http://gpu_0", "http://gpu_0:80", "gpu_0-80"),
        ("https://gpu0", "https://gpu0:443", "gpu0-443"),
        ("http://ä:1", "http://xn--4ca:1", "xn--4ca-1"),
        ("http://[0::1]:8081", "http://[::1]:8081", "__1-8081"),
        ("http://[::1]", "http://[::1]:80", "__1-80"),
    ],
)
def test_urls_have_one_spelling(url: str, normal: str, name: str) -> None:
    backend = BackendConfig.model_validate({"url": url})

    assert (normal, name) == (backend.url, backend.name)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080),
        ("Localhost:0", "localhost", 0),
        ("[::1]:65535", "::1", 65535),
        ("[0::0]:1", "::", 1),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = values.address(text)

    assert Address(host, port) == address
    assert address == values.address(str(address))


# Messages for invalid files: path, line, part of the message

BAD = [
    ("store: {max_bytes: 1XB}", "store.max_bytes", 3, "a size such as 500MB"),
    ("store: {max_bytes: -2}", "store.max_bytes", 3, "of at least -1"),
    ("store: {max_bytes: 1.5}", "store.max_bytes", 3, "not 1.5"),
    ("store: {max_bytes: 32}", "store.max_bytes", 3, "all snapshots would be deleted"),
    ("store: {max_bytes: 32G}", "store.max_bytes", 3, "did you mean 32GiB?"),
    *(
        (f"store: {{max_bytes: '{size}'}}", "store.max_bytes", 3, "a size such as 500MB")
        for size in (
            *("32,5GiB", "1,000,000", "1.5.2GiB", "64-MiB", "10 %", "32GiB of RAM", "8Mbit"),
            *("10m", "1.5B", "5PB", "1000"),
        )
    ),
    ("store: {max_bytes: 99999999TiB}", "store.max_bytes", 3, "99999999TiB"),
    ("store:\n  max_tokens: many", "store.max_tokens", 4, "must be a valid integer, not 'many'"),
    ("store: {max_tokens: true}", "store.max_tokens", 3, "not true"),
    ("store: {max_tokens: '5'}", "store.max_tokens", 3, "must be a valid integer"),
    ("store: {min_tokens: 1.0}", "store.min_tokens", 3, "must be a valid integer"),
    ("store:\n  max_tokens: 100", "store.min_tokens", 3, "at most max_tokens (100), not 128"),
    ("store: {fsync: maybe}", "store.fsync", 3, "must be true or false, not 'maybe'"),
    ("store: {fsync: 1}", "store.fsync", 3, "must be true or false, not 1"),
    ("store: {idle_save_after: 0}", "store.idle_save_after", 3, "`off` disables it"),
    ("store: {idle_save_after: -1}", "store.idle_save_after", 3, "`off` disables it"),
    ("store: []", "store", 3, "must be a mapping"),
    ("store: {listen: 1}", "store.listen", 3, "belongs at the top level"),
    ("policy: cheapst", "policy.name", 3, "'cheapest', 'sticky'"),
    ("policy:\n  name: 3", "policy.name", 4, "must be 'prefer_idle_slot"),
    ("policy: 3", "policy", 3, "must be a mapping"),
    ("policy: {reuse_probability: 1.1}", "policy.reuse_probability", 3, "equal to 1, not 1.1"),
    ("policy: {reuse_probability: '1'}", "policy.reuse_probability", 3, "must be a valid number"),
    ("policy: {max_wait: off}", "policy.max_wait", 3, "a time such as 500ms"),
    ("policy: {max_wait_s: 1s}", "policy.max_wait_s", 3, "did you mean `max_wait`?"),
    ("queue: {max_requests: -1}", "queue.max_requests", 3, "at least 0, not -1"),
    ("queue: {deadline: -1}", "queue.deadline", 3, "`off` disables it"),
    ("limits: {idle_timeout: 5}", "limits.idle_timeout", 3, "a time such as 500ms"),
    ("limits: {idle_timeout: 5 days}", "limits.idle_timeout", 3, "a time such as 500ms"),
    ("limits: {idle_timeout: 99999h}", "limits.idle_timeout", 3, "at most 8784h"),
    ("limits: {idle_timeout: 0}", "limits.idle_timeout", 3, "more than 0"),
    ("limits: {max_body: 0}", "limits.max_body", 3, "of at least 1; not 0"),
    ("limits: {idle_timeut: 1s}", "limits.idle_timeut", 3, "did you mean `idle_timeout`?"),
    ("limits: {zzz: 1s}", "limits.zzz", 3, "max_body, body_memory, body_timeout"),
    ("limits: {connections: 0}", "limits.connections", 3, "at least 1, not 0; -1 is no limit"),
    ("limits: {connections: true}", "limits.connections", 3, "not true"),
    ("limits: {connections_per_client: -2}", "limits.connections_per_client", 3, "at least -1"),
    ("limits: {max_headers: 0}", "limits.max_headers", 3, "at least 1, not 0"),
    ("limits: {max_header: 0}", "limits.max_header", 3, "of at least 1; not 0"),
    ("limits: {header_timeout: 0}", "limits.header_timeout", 3, "more than 0"),
    ("admin: {listen: 127.0.0.1:8080}", "admin.listen", 3, "where clients connect"),
    ("admin: {listen: 0.0.0.0:8080}", "admin.listen", 3, "take another port"),
    ("admin: {listen: 127.0.0.1:8081}", "backends[0].url", 2, "where kvferry itself listens"),
    ("admin: {listen: 9080}", "admin.listen", 3, "must be host:port"),
    ("admin: {protect_reads: true}", "admin.protect_reads", 3, "needs admin.token_env"),
    ("admin: {protect_reads: 1}", "admin.protect_reads", 3, "must be true or false"),
    ("tls: {certificate: /c}", "tls.key", 3, "is required with certificate"),
    ("tls: {key: /k}", "tls.certificate", 3, "is required with key"),
    ("tls: {certificate: c.pem, key: /k}", "tls.certificate", 3, "an absolute path"),
    ("store: {group_access: 770}", "store.group_access", 3, "must be true or false"),
    ("health: {failures: 0}", "health.failures", 3, "at least 1, not 0"),
    ("tokenizer: {mode: local}", "tokenizer.path", 3, "is required with mode: local"),
    ("tokenizer: {path: /m}", "tokenizer.path", 3, "with mode: local only"),
    ("tokenizer: {mode: local, path: m.gguf}", "tokenizer.path", 3, "an absolute path"),
    ("logging: {level: INFO}", "logging.level", 3, "'info', 'warning' or 'error'"),
    ("logging: {level: }", "logging.level", 3, "not nothing"),
    ("shutdown_grace: 30", "shutdown_grace", 3, "a time such as 500ms"),
    ("max_body: 1MiB", "max_body", 3, "belongs under `limits`"),
    ("servers: {models: [{name: m, path: /m}]}", "servers.models[0].path", 3, "here: name, model"),
    ("polcy: cheapest", "polcy", 3, "did you mean `policy`?"),
    ("listen: 8081", "listen", 3, "must be host:port"),
    ("listen: :8081", "listen", 3, "0.0.0.0:8080"),
    ("listen: ::1:8081", "listen", 3, "'[::1]:8080' in quotes"),
    ("listen: '[::g]:8081'", "listen", 3, "must be host:port"),
    ("listen: a:65536", "listen", 3, "invalid port number"),
    ("listen: a b:1", "listen", 3, "must be host:port"),
    ("listen: [::1]:8081", "", 3, "while parsing a flow node"),
    ("listen: localhost:8081", "backends[0].url", 2, "is where kvferry itself listens"),
    ("listen: 0.0.0.0:8081", "backends[0].url", 2, "give the llama-server another port"),
    ("probe: !mine {enabled: true}", "", 3, "could not determine a constructor"),
    ("probe: {enabled: !!int x}", "", None, "not valid YAML"),
    ("probe: {enabled: !!bool maybe}", "", None, "not valid YAML"),
    ("queue: {max_requests: !!int ''}", "", None, "not valid YAML"),
    ("queue: {on: 1}", "queue", 3, "put it in quotes"),
    ("? [a]\n: 1", "", 3, "found unhashable key"),
    ("queue: {deadline: 1s,\n  deadline: 2s}", "queue.deadline", 4, "the first is on line 3"),
    ("backends: []", "backends", 3, "is given twice; the first is on line 1"),
    ("store:\n\tfsync: true", "", 4, "found character '\\t'"),
    ("store: {", "", 3, "not valid YAML"),
    ("store: *s", "", 3, "undefined alias 's'"),
    ("a: &a x\nb: &a y", "", 4, "found duplicate anchor 'a'"),
    ("---\na: 1", "", 3, "but found another document"),
    ("a: \x07", "", 3, "the character U+0007"),
    ('a: "\\UFFFFFFFF"', "", None, "not valid YAML"),
]


def test_bad_values() -> None:
    wrong = []
    for text, path, line, message in BAD:
        found = problems(MINIMAL + text)
        if not any((path, line) == (p, n) and message in told for p, n, told in found):
            wrong.append((text, found))
    assert wrong == []


BAD_BACKENDS = [
    ("- {}", "backends[0].url", "is required: the base URL"),
    ("-", "backends[0].url", "is required: the base URL"),
    ("- http://a:1", "backends[0]", "must be a mapping"),
    ("- {url: 5}", "backends[0].url", "not 5"),
    ("- {url: 'a:1'}", "backends[0].url", "should be 'http' or 'https'"),
    ("- {url: 'ftp://a:1'}", "backends[0].url", "should be 'http' or 'https'"),
    ("- {url: 'http://a:1/v1'}", "backends[0].url", "no /v1"),
    ("- {url: 'http://a:1/x/../y'}", "backends[0].url", "without path or query"),
    ("- {url: 'http://a:1/x?b'}", "backends[0].url", "without path or query"),
    ("- {url: 'http://a:1?b'}", "backends[0].url", "without path or query"),
    ("- {url: 'http://a:1#b'}", "backends[0].url", "without path or query"),
    ("- {url: 'http://a b:1'}", "backends[0].url", "invalid international domain name"),
    ("- {url: 'http://:1'}", "backends[0].url", "empty host"),
    ("- {url: 'http://a:0'}", "backends[0].url", "must be a base URL"),
    ("- {url: 'http://a:99999'}", "backends[0].url", "invalid"),
    ("- {url: 'http://[::1'}", "backends[0].url", "invalid"),
    ("- {url: 'http://a:1', kv_dir: ~/kv}", "backends[0].kv_dir", "`~` and variables"),
    ("- {url: 'http://a:1', kv_dir: $HOME/kv}", "backends[0].kv_dir", "are not expanded"),
    ("- {url: 'http://a:1', kv_dir: kv}", "backends[0].kv_dir", "an absolute path"),
    ("- {url: 'http://a:1', kv_dir: /a/../b}", "backends[0].kv_dir", "without `..`"),
    ('- {url: "http://a:1", kv_dir: "/a\\0"}', "backends[0].kv_dir", "absolute path"),
    ("- {url: 'http://a:1', name: a b}", "backends[0].name", "letters, digits"),
    ("- {url: 'http://a:1', name: ''}", "backends[0].name", "1 to 64"),
    ("- {url: 'http://a:1', models: gpt}", "backends[0].models", "must be a list"),
    ("- {url: 'http://a:1', models: [a, 5]}", "backends[0].models[1]", "put it in quotes"),
    ("- {url: 'http://a:1', models: ['']}", "backends[0].models[0]", "at least 1 character"),
    ("- {url: 'http://a:1', max_concurrent: 2}", "backends[0].max_concurrent", "known here: url"),
    ("- {url: 'http://a:1'}\n- {url: 'http://A:1/'}", "backends[1].url", "that of entry number 1"),
    (
        "- {url: 'http://a:1', name: x}\n- {url: 'http://b:1', name: x}",
        "backends[1].name",
        "is also that of entry number 1",
    ),
    ("- {url: 'http://localhost:8080'}", "backends[0].url", "where kvferry itself listens"),
]


@pytest.mark.parametrize(("entries", "path", "message"), BAD_BACKENDS)
def test_bad_backends(entries: str, path: str, message: str) -> None:
    found = problems("# a comment\nbackends:\n" + entries)

    line = 3 + entries.count("\n")  # the last entry is wrong
    assert [(path, line)] == [(p, n) for p, n, _ in found]
    assert message in found[0][2]


@pytest.mark.parametrize(
    ("text", "path", "line", "message"),
    [
        ("", "", 1, "is empty"),
        ("# nothing\n", "", 1, "is empty"),
        ("- a", "", 1, "must be a mapping"),
        ("backends", "", 1, "must be a mapping"),
        ("null", "backends", 1, "is required: a list"),
        ("listen: 1.2.3.4:5", "backends", 1, "is required: a list"),
        ("backends:", "backends", 1, "must be a list"),
        ("backends: []", "backends", 1, "is empty"),
        ("backends: {url: 'http://a:1'}", "backends", 1, "must be a list"),
        ("a: &a [*a]", "a", 1, "unknown key"),
        ("[" * 100_000, "", None, "nested too deeply"),
        ("%YAML " + "1" * 5000 + ".1\n---\n", "", None, "not valid YAML"),
    ],
    ids=range(12),
)
def test_bad_documents(text: str, path: str, line: int | None, message: str) -> None:
    found = problems(text)

    assert (path, line) == found[0][:2]
    assert message in found[0][2]


def test_all_problems_are_told_at_once_in_the_order_of_the_file() -> None:
    text = """\
kv_dir: /kv
backends:
  - url: http//localhost:8080
  - url: http://a:1
    kv_dir: kv
store:
  max_tokens: 1
  min_tokens: 2
tokenizer: {mode: local}
limits: {idle_timeout: 5, idle_timeout: 6}
"""
    assert [(path, line) for path, line, _ in problems(text)] == [
        ("kv_dir", 1),
        ("backends[0].url", 3),
        ("backends[1].kv_dir", 5),
        ("store.min_tokens", 8),
        ("tokenizer.path", 9),
        ("limits.idle_timeout", 10),
        ("limits.idle_timeout", 10),
    ]


def test_all_contradictions_are_told_at_once() -> None:
    text = """\
backends: [{url: "http://a:1"}, {url: "http://b:1"}, {url: "http://b:1"}]
listen: 127.0.0.1:8080
policy: passthrough
admin: {listen: "127.0.0.1:8080"}
auth: {keys: [{name: a, hash: 'sha256:HASH'}]}
""".replace("HASH", "0" * 64)
    assert {path for path, _, _ in problems(text)} == {
        *("backends[2].url", "policy.name", "admin.listen")
    }


def test_an_alias_is_read_once() -> None:
    """Twelve lines that stand for 9^12 values take no time and no memory."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 12):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]")

    assert all(
        "unknown key" in told or "is required" in told for _, _, told in problems("\n".join(lines))
    )


@pytest.mark.parametrize(
    "text",
    [
        "backends: [{url: 'http://me:hunter2@a:1'}]",
        "backends: [{url: 'http://a:1', api_key_env: sk-hunter2}]",
        "backends: [{url: 'http://a:1', api_key: hunter2}]",
        "backends: [{url: 'http://a:1', api_key_env: !!int hunter2}]",
        "backends: [{url: 'http://a:1', api_key_env: !!set {hunter2}}]",
    ],
)
def test_secrets_are_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schema.parse(text, "test.yaml")

    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value)


# Files, and the output of `check`


def test_check_prints_what_editors_can_jump_to(tmp_path: Path) -> None:
    path = tmp_path / "k.yaml"
    path.write_text(MINIMAL + "store: {max_byte: 1}\nlisten: 1\n")

    status, text = check.check_text(path)

    assert status == 2
    assert (
        f"{path}:3: store.max_byte: unknown key; did you mean `max_bytes`?" == text.split("\n")[0]
    )
    assert text.split("\n")[1].startswith(f"{path}:4: listen: must be host:port")
    assert len(text.split("\n")) == 2


@pytest.mark.parametrize(
    ("data", "line", "message"), [(b"# fine\nname: \xff", 2, "is not UTF-8")], ids=["latin-1"]
)
def test_files_that_are_no_text(
    tmp_path: Path, data: bytes, line: int | None, message: str
) -> None:
    path = tmp_path / "k.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        schema.load(path)

    (problem,) = caught.value.problems
    assert line == problem.line
    assert message in problem.message


@pytest.mark.parametrize("name", ["missing.yaml", "", "a\0b"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    status, text = check.check_text(tmp_path / name)

    assert status == 2
    assert "cannot be read: " in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no backend has a kv_dir"),
        ("policy: sticky", "policy sticky never moves KV"),
        ("tokenizer: {mode: off}", "prompts are not tokenized"),
        ("queue: {deadline: off}", "deadline none"),
    ],
)
def test_the_summary_says_what_has_no_effect(text: str, said: str) -> None:
    assert said in check.summary(minimal(text))


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("{}", "at least 128 tokens are kept, up to 32GiB."),
        ("{max_tokens: 1000}", "up to 32GiB and 1000 tokens."),
        ("{max_bytes: -1}", "are kept, without limit."),
        ("{blobs: /b}", "They are written as blobs to /b, at most 100GiB a day."),
        ("{blobs: /b, max_written_per_day: -1}", "They are written as blobs to /b."),
        ("{max_bytes: 0}", "the store is off (max_bytes or max_tokens is 0)."),
        ("{}\nprobe: {enabled: false}", "only probed backends may save and restore."),
    ],
)
def test_the_summary_says_what_is_kept(store: str, said: str) -> None:
    text = f"backends: [{{url: 'http://a:1', kv_dir: /kv}}]\nstore: {store}"
    summary = check.summary(schema.parse(text, "test.yaml"))

    assert said in summary
    assert "serve 1 backend: a-1 (http://a:1, kv_dir /kv)." in summary


# Flags


def test_problems_with_flags_name_the_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        schema.from_flags(["a:1", "http://b:1"], "kv", "80", "best")

    assert sorted((p.path, p.line) for p in caught.value.problems) == [
        ("--backend (number 1)", None),
        ("--kv-dir", None),
        ("--listen", None),
        ("--policy", None),
    ]
    assert "command line: --listen: must be host:port" in str(caught.value)


# Sizes and times


@given(st.integers(1, values.MAX_SIZE_BYTES) | st.integers(1, 9000).map(lambda n: n << 30))
@example(1024)
@example(1000)
@example(0)
def test_sizes_survive_a_round_trip(n_bytes: int) -> None:
    assert n_bytes == values.size(values.format_size(n_bytes))


@given(st.integers(0, 366 * 86_400_000).map(lambda ms: ms / 1000) | st.floats(0, 1e6))
@example(0.0)
@example(1e-7)
@example(0.0005)
def test_times_survive_a_round_trip(seconds: float) -> None:
    seconds = round(seconds, 9)  # nanoseconds: more digits than a time in a file ever has
    text = values.format_duration(seconds)

    assert seconds == values.duration(text, positive=False)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        (0, 0),
        (10, 10),
        ("10B", 10),
        ("10KiB", 10_240),
        ("10kB", 10_000),
        ("10 KB", 10_000),
        ("500MB", 500_000_000),
        ("32gib", 32 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.1kB", 100),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: object, n_bytes: int) -> None:
    assert n_bytes == values.size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(0, 0), ("0s", 0), ("500ms", 0.5), ("2s", 2), ("1.5 s", 1.5), ("10m", 600), ("1h", 3600)],
)
def test_times(text: object, seconds: float) -> None:
    assert seconds == values.duration(text, positive=False)


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(-1, "no limit"), (0, "0B"), (1, "1B"), (1536, "1536B"), (10**9, "1GB")]
)
def test_sizes_are_shown_short(n_bytes: int, text: str) -> None:
    assert text == values.format_size(n_bytes)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "off"), (0.25, "250ms"), (90, "90s"), (600.0, "10m"), (0, "0s")]
)
def test_times_are_shown_short(seconds: float | None, text: str) -> None:
    assert text == values.format_duration(seconds)


# Any text gives a Config or a ConfigError


def is_handled(text: str) -> None:
    """Check that only ConfigError is raised, with printable problems on existing lines."""
    try:
        schema.parse(text, "fuzz")
        return
    except ConfigError as error:
        found = error.problems
        shown = str(error)
    assert found
    assert shown.encode("utf-8")
    n_lines = 1 + sum(text.count(end) for end in "\n\r\x85\u2028\u2029")
    for problem in found:
        assert problem.message
        assert problem.line is None or 1 <= problem.line <= n_lines


KEYS = [*keys_of(Config), *(k for m in keys_of(Config).values() if m for k in keys_of(m))]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.dates()
    | st.binary(max_size=5)
    | st.sampled_from(
        [10**4000, "off", "1s", "1GiB", "/kv", "http://a:1", "[::1]:1", "http://[", -1]
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | SCALARS, children, max_size=6)
    ),
    max_leaves=30,
)
SECTION = st.dictionaries(st.sampled_from(KEYS), SCALARS | st.lists(SCALARS, max_size=3))
DOCUMENT = st.fixed_dictionaries(
    {"backends": st.lists(SECTION | VALUES, max_size=3)},
    optional={key: SECTION | VALUES for key in keys_of(Config) if key != "backends"},
)


@settings(deadline=None, max_examples=100)
@given(VALUES | DOCUMENT)
@example({"listen": date(2000, 1, 1)})
def test_no_structure_is_too_odd(value: object) -> None:
    is_handled(yaml.dump(value))


@settings(deadline=None, max_examples=100)
@given(st.text(st.characters(codec=None)) | st.text("[]{}:-?!&*#|>%@`'\"\\\n\t ,a0~<.U"))
@example("\ud800")
@example('"\\ud800": 1')
@example('"\\xZZ"')
@example("!<%ff> a")
@example("%TAG ! tag:\n--- !x a")
@example("a: 2024-99-99\nb: 1:99\nc: 0o9\nd: .inf\ne: 1_000\n=: 1")
def test_no_text_is_too_odd(text: str) -> None:
    is_handled(text)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_damaged_file_is_too(data: st.DataObject) -> None:
    """Real files with one stretch replaced come closer to a person's slips than random text."""
    text = REFERENCE.read_text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 30)))
    is_handled(text[:start] + data.draw(st.text("[]{}:-!&*\n\t ,a0~", max_size=5)) + text[end:])


@given(st.lists(st.text(max_size=30), max_size=3), st.text(), st.text(), st.text())
def test_no_flag_is_too_odd(urls: list[str], kv_dir: str, listen: str, policy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schema.from_flags([*urls, "nonsense"], kv_dir, listen, policy)
    assert caught.value.problems


def test_odd_keys_cannot_disturb_the_output() -> None:
    assert path_text(("a\nb", 0, "c")) == "'a\\nb'[0].c"
