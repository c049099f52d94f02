"""`kvferry warm`: have a prompt computed and saved ahead of use, and list what is kept."""

import argparse
import sys
from math import inf
from pathlib import Path

from router.base.decoding import UndecodableError, json_of
from router.tools.console.client import CallError, Json, add_url, ask
from router.tools.console.format import print_json, size, table
from router.tools.terminal import output

_PATH = "/kvferry/warm"
_TEXT, _CHAT, _MESSAGES = "/completion", "/v1/chat/completions", "/v1/messages"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    told = "the JSON body of a request, or a text; - for standard input; none: list what is kept"
    command.add_argument("file", nargs="?", metavar="FILE", help=told)
    command.add_argument("--keep", default="always", metavar="TIME", help="24h, 7d, or always")
    command.add_argument("--path", help="the route of the body; default: by its fields")
    command.add_argument("--model", help="the model, if the body names none")
    command.add_argument("--tenant", help="the tenant of the prompt, where tenants are kept apart")
    command.add_argument("--json", action="store_true", help="print the JSON of the router")
    add_url(command)
    command.set_defaults(run=warm)


def warm(options: argparse.Namespace) -> int:
    """Warm a prompt, or list what is kept. Returns 0. Raises CallError."""
    listing = options.file is None
    found = ask(options.url, "GET", _PATH) if listing else _warm(options)
    if options.json:
        print_json(found)
    elif listing:
        _show(found["kept"])
    else:
        output().print(
            f"{found['saved_tokens']:,} of {found['prompt_tokens']:,} tokens are saved"
            f" ({found['computed_tokens']:,} were computed now, on {found['backend']})"
        )
    return 0


def _warm(options: argparse.Namespace) -> Json:
    body = body_of(_read(options.file))
    if options.model is not None:
        body.setdefault("model", options.model)
    query = {"path": options.path or path_of(body), "keep": options.keep}
    if options.tenant is not None:
        query["tenant"] = options.tenant
    return ask(options.url, "POST", _PATH, query, body, timeout_s=inf)


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise CallError(f"{file}: {error.strerror}", bad_input=True) from error


def body_of(content: bytes) -> Json:
    """Return a JSON object as the body, anything else as a text. Raises CallError."""
    try:
        found = json_of(content)
    except UndecodableError:
        found = None
    if isinstance(found, dict):
        return found
    try:
        return {"prompt": content.decode()}
    except UnicodeDecodeError as error:
        raise CallError("the file is neither JSON nor a text in UTF-8", bad_input=True) from error


def path_of(body: Json) -> str:
    """Return the route that a body is for, as its fields tell."""
    if "prompt" in body:
        return _TEXT
    if "input" in body:
        return "/v1/responses"
    return _MESSAGES if "system" in body else _CHAT


def _show(found: list[Json]) -> None:
    console = output()
    if not found:
        console.print("nothing is kept: kvferry warm FILE computes and saves a prompt")
        return
    made = table("snapshot", "tokens", "size", "hits", right=("tokens", "size", "hits"))
    for one in found:
        made.add_row(
            one["snapshot"], f"{one['tokens']:,}", size(one["size_bytes"]), f"{one['hits']:,}"
        )
    console.print(made)
