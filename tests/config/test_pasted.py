"""What people paste is taken as it is meant, or refused with what to write."""

import pytest

from router.config.loader import ConfigError
from router.config.schema import Config, parse

ONE = "backends: [{url: 'http://127.0.0.1:9'}]"


def config(more: str) -> Config:
    return parse(f"{ONE}\n{more}", "test")


def test_hosts_and_origins_as_an_address_bar_has_them() -> None:
    hosts = "'https://LLM.example.com/', 'ai.example.com:443', '*.example.net', 'box.lan.'"
    origins = (
        "'https://Chat.example.com/', 'https://a.example:443', 'http://b.example:8080', 'null'"
    )
    browsers = config(f"browsers: {{hosts: [{hosts}], origins: [{origins}]}}").browsers
    assert browsers.hosts == ("llm.example.com", "ai.example.com", "*.example.net", "box.lan")
    assert browsers.origins == (
        *("https://chat.example.com", "https://a.example", "http://b.example:8080"),
        "null",
    )


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("browsers: {hosts: ['']}", "must be a name such as ai.example.com"),
        ("browsers: {origins: [chat.example.com]}", "must be an origin such as https://chat"),
        ("servers: {models: [{name: m, hf: a/b, args: ['-ngl 99']}]}", '"-ngl", "99"'),
        ("servers: {models: [{name: m, hf: a/b, args: ['-ngl=99']}]}", '"-ngl", "99"'),
    ],
)
def test_what_is_refused_says_what_to_write(more: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(more)
    assert told in str(caught.value)


@pytest.mark.parametrize("told", ["hf:u/r:Q4", "hf.co/u/r:Q4", "https://huggingface.co/u/r:Q4"])
def test_a_model_as_other_programs_write_it(told: str) -> None:
    (model,) = config(f"servers: {{models: [{{name: m, hf: '{told}'}}]}}").servers.models
    assert model.hf == "u/r:Q4"
