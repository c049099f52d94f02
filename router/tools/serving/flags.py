"""The flags of `kvferry serve` for servers on demand."""

import argparse
import re
import shlex
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_HF = "hf:"


def add_server_options(command: argparse.ArgumentParser) -> None:
    """Add the flags to a command."""
    add = command.add_argument_group("servers that kvferry starts").add_argument
    add(
        "--model",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="a .gguf file, or hf:user/repository:quant; repeatable; default name: the file's",
    )
    add(
        "--loaded",
        type=int,
        metavar="N",
        help="models that are loaded at a time; default: all of them",
    )
    add("--slots", type=int, metavar="N", help="slots of each server; default 4")
    add("--ctx", type=int, metavar="N", help="tokens of the context of each slot; default 16384")
    add("--server-args", default="", metavar='"..."', help="more arguments for llama-server")
    add("--llama-server", metavar="PATH", help="the llama-server program; default: searched for")


def servers_from(options: argparse.Namespace) -> dict[str, object]:
    """Return the `servers` section for the flags."""
    common: dict[str, object] = {"args": shlex.split(options.server_args)}
    if options.slots is not None:
        common["slots"] = options.slots
    if options.ctx is not None:
        common["ctx"] = options.ctx
    found: dict[str, object] = {"models": [_model(text) | common for text in options.model]}
    if options.loaded is not None:
        found["loaded"] = options.loaded
    if options.llama_server is not None:
        found["llama_server"] = str(Path(options.llama_server).absolute())
    return found


def _model(text: str) -> dict[str, object]:
    name, equals, what = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        name, what = "", text
    if what.startswith(_HF):
        reference = what.removeprefix(_HF)
        return {"name": name or reference.partition("/")[2].replace(":", "-"), "hf": reference}
    path = Path(what).absolute()
    return {"name": name or path.name.removesuffix(".gguf"), "model": str(path)}
