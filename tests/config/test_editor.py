"""The JSON Schema that editors use while a configuration is written."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from router.config.editor import PATH
from router.config.schema import ConfigError, parse
from router.tools.cli import main
from tests.config.editor_schema import schema
from tests.support.paths import ROOT

FILES = sorted((ROOT / "config").glob("*.yaml"))
BACKENDS: dict[str, Any] = {"backends": [{"url": "http://127.0.0.1:8081"}]}


def complaints(document: object) -> list[str]:
    """Return what an editor would mark."""
    checker = jsonschema.Draft202012Validator(json.loads(PATH.read_text()))
    return [error.json_path for error in checker.iter_errors(document)]


def test_schema_is_that_of_the_code_and_the_reference() -> None:
    """If not: python -m tests.config.editor_schema"""
    assert json.loads(PATH.read_text()) == schema()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_example_is_valid_and_names_the_schema(path: Path) -> None:
    first = path.read_text().split("\n")[0]
    named = first.removeprefix("# yaml-language-server: $schema=")

    assert (path.parent / named).resolve() == PATH
    assert complaints(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"polcy": {}}, "$"),
        ({"policy": {"name": "fastest"}}, "$.policy"),
        ({"policy": {"coalesce_above": "soon"}}, "$.policy"),
        ({"store": {"max_bytes": "32 gigs"}}, "$.store"),
        ({"queue": {"deadline": 30}}, "$.queue"),
        ({"backends": [{"url": "localhost:8081"}]}, "$.backends[0].url"),
        ({"backends": [{"kv_dir": "/kv"}]}, "$.backends[0]"),
        ({"store": {"max_tokens": "many"}}, "$.store"),
    ],
)
def test_mistake_is_marked_where_kvferry_refuses_it(more: dict[str, Any], where: str) -> None:
    document = BACKENDS | more

    assert complaints(document) == [where]
    with pytest.raises(ConfigError):
        parse(yaml.safe_dump(document), "test.yaml")


@pytest.mark.parametrize(
    "more",
    [
        {"store": None},
        {"policy": {"coalesce_above": "off"}},
        {"policy": {"coalesce_above": False}},  # YAML 1.1 reads `off` so
        {"store": {"max_bytes": -1, "min_tokens": 0}},
        {"store": {"max_bytes": "1.5GiB"}},
        {"shutdown_grace": 0},
        {"servers": {"models": [{"name": "a", "model": "/m.gguf"}]}},
    ],
)
def test_valid_value_is_not_marked(more: dict[str, Any]) -> None:
    document = BACKENDS | more

    assert complaints(document) == []
    parse(yaml.safe_dump(document), "test.yaml")


def test_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()
