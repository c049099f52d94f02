"""Filters of a running router: what the server gets, and the names that clients see."""

from pathlib import Path

import pytest

from router.config.loader import ConfigError
from router.config.schema import parse
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import running

YAML = """
filters:
  - {name: precise, model: fake, strip: [seed], default: {top_k: 20}, set: {temperature: 0}}
"""


async def test_filtered_request_and_its_name(tmp_path: Path) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path, yaml=YAML) as kvferry,
    ):
        body = {"model": "precise", "prompt": "hello", "seed": 3, "temperature": 1, "n_predict": 2}
        answer = await kvferry.post("/completion", body)
        assert answer.status == 200, answer.body
        sent = [body for path, body in fake.bodies if path == "/completion"][-1]
        listed = (await kvferry.get("/v1/models")).json["data"]
        counted = await kvferry.post("/tokenize", {"model": "precise", "content": "hello"})
        assert counted.status == 200, counted.body
        planned = await kvferry.post("/kvferry/plan?path=/completion", body)

    assert {key: sent[key] for key in ("model", "top_k", "temperature")} == {
        "model": "fake",
        "top_k": 20,
        "temperature": 0,
    }
    assert "seed" not in sent
    assert {model["id"] for model in listed} == {"fake", "precise"}
    assert planned.json["plan"] is not None


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("{name: a, set: {messages: []}}", "messages is a field that no filter changes"),
        ("{name: a, strip: [model]}", "`model` of the filter does"),
        ("{name: a}, {name: a}", "is also that of entry number 1"),
        ("{name: a, sett: {}}", "sett"),
    ],
)
def test_wrong_filter_is_told(entry: str, told: str) -> None:
    text = f"backends: [{{url: 'http://127.0.0.1:1'}}]\nfilters: [{entry}]"
    with pytest.raises(ConfigError, match=told):
        parse(text, "kvferry.yaml")
