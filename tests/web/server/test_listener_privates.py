"""The listener extends aiohttp's connection; it uses names of it that are not public.

aiohttp is pinned to one minor version because of these. To allow the next version: read aiohttp's
changes of `web_protocol.py`, see this test and the others of the listener pass, and move the pin.
"""

import ast
import inspect
import tomllib
from importlib.metadata import version

from aiohttp import web
from packaging.requirements import Requirement

from router.web.server import listener
from tests.support.paths import ROOT

# Names of `web.RequestHandler`, and what the listener needs each for.
USED = {
    "_current_request": "to know whether a request has begun",
    "_keepalive_handle": "to keep a connection that the loop throttle holds",
    "_loop": "timers",
    "_messages": "the requests that the parser found",
    "_pause_transport_reading": "to read nothing more while the loop throttle holds a connection",
    "_process_keepalive": "as `_keepalive_handle`",
    "_request_count": "to know whether all requests are answered",
    "_resume_transport_reading": "as `_pause_transport_reading`",
    "_upgraded": "to look for no heads after an upgrade",
    "_waiter": "to know whether the connection is being closed",
}


def test_the_names_are_those_of_aiohttp() -> None:
    """A name that aiohttp dropped would be a new attribute of ours, and never change."""
    there = set(dir(web.RequestHandler))
    assert sorted(USED.keys() - there) == []


def test_the_listener_uses_no_others() -> None:
    tree = ast.parse(inspect.getsource(listener))
    of_self = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and node.attr.startswith("_")
    }
    assert of_self & set(dir(web.RequestHandler)) - set(vars(listener._Connection)) == (
        USED.keys() - set(vars(listener._Connection))
    )


def test_the_version_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = (
        found for text in project["dependencies"] if (found := Requirement(text)).name == "aiohttp"
    )
    major, minor = version("aiohttp").split(".")[:2]
    assert f"{major}.{minor}.99" in pinned.specifier
    assert f"{major}.{int(minor) + 1}.0" not in pinned.specifier
