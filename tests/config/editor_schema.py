"""`python -m tests.config.editor_schema`: write router/config/kvferry.schema.json.

The types are pydantic's; the text of each key is its comment in the reference. An editor shows both
while a configuration is written.
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from router.config.editor import PATH
from router.config.schema import Config
from tests.support.paths import ROOT

REFERENCE = ROOT / "config" / "kvferry.reference.yaml"
Json = dict[str, Any]

_KEY = re.compile(r"( *(?:- )?)([a-z_]+):")


def schema() -> Json:
    """Return the schema."""
    made = Config.model_json_schema(by_alias=True)
    _strip(made)
    for path, text in comments():
        if (found := _key(made, path)) is not None:
            found["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def comments() -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each key of the reference, and the comment above it."""
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in REFERENCE.read_text().split("\n"):
        text = line.strip()
        if text.startswith("#"):
            above.append(text.removeprefix("#").strip())
        elif (found := _KEY.match(line)) is not None:
            indent = len(found[1])
            path = [(at, key) for at, key in path if at < indent] + [(indent, found[2])]
            if above:
                yield tuple(key for _, key in path), " ".join(above)
            above = []
        else:
            above = []


def _strip(node: object, *, of_names: bool = False) -> None:
    """Drop titles, and defaults as Python has them; let a section be empty.

    `of_names`: the keys of this object are names of properties, not words of JSON Schema.
    """
    if isinstance(node, list):
        for item in node:
            _strip(item)
    if not isinstance(node, dict):
        return
    if not of_names:
        node.pop("title", None)
        if "default" in node and "$ref" in node:  # a section without keys has its defaults
            node["anyOf"] = [{"$ref": node.pop("$ref")}, {"type": "null"}]
        node.pop("default", None)
    for key, below in node.items():
        _strip(below, of_names=not of_names and key in ("properties", "$defs"))


def _key(made: Json, path: tuple[str, ...]) -> Json | None:
    """Return the schema of a key; None: it is inside a mapping of free names."""
    here, found = made, None
    for name in path:
        found = here.get("properties", {}).get(name)
        if found is None:
            return None
        here = _section(made, found)
    return found


def _section(made: Json, found: Json) -> Json:
    text = json.dumps(found)
    reference = re.search(r'"#/\$defs/(\w+)"', text)
    section: Json = made["$defs"][reference[1]] if reference is not None else {}
    return section


def main() -> int:
    """Write the file. Returns 0."""
    PATH.write_text(json.dumps(schema(), indent=1, ensure_ascii=False) + "\n")
    sys.stdout.write(f"{PATH} is written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
