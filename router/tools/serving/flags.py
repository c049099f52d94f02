"""The flags of `kvferry serve` for servers on demand and for other hosts."""

import argparse
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

from router.assembly.backends import StartError
from router.config.schema import FLEET_FLAGS
from router.config.servers import REPLICA
from router.config.values import hf_reference, label_of

_HF = "hf:"
# Each kind of GPU has its own.
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES")


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
    add("--gpus", type=int, metavar="N", help="a server of each model on each of N GPUs")
    add("--server-args", default="", metavar='"..."', help="more arguments for llama-server")
    add(
        "--llama-server",
        metavar="PROGRAM",
        help="the llama-server program, a path or a name on PATH; default: searched for",
    )


def of_each_model(options: argparse.Namespace) -> list[str]:
    """Return the names of the given flags that say how a `--model` is served."""
    flags = {
        "--slots": options.slots is not None,
        "--ctx": options.ctx is not None,
        "--gpus": options.gpus is not None,
        "--server-args": options.server_args,
    }
    return [flag for flag, given in flags.items() if given]


def for_all_servers(options: argparse.Namespace) -> dict[str, object]:
    """Return the keys of the `servers` section that these flags give, but its models."""
    found: dict[str, object] = {}
    if options.loaded is not None:
        found["loaded"] = options.loaded
    if options.llama_server is not None:
        program = shutil.which(options.llama_server) or options.llama_server
        found["llama_server"] = str(Path(program).absolute())
    return found


def servers_from(options: argparse.Namespace) -> dict[str, object] | None:
    """Return the `servers` section for the flags; None: without any. Raises StartError."""
    found = for_all_servers(options)
    given = [f"--{key.replace('_', '-')}" for key in found] + of_each_model(options)
    if not options.model:
        if given:
            raise StartError(f"{', '.join(given)}: say which model is meant: add --model FILE")
        return None
    try:
        common: dict[str, object] = {"args": shlex.split(options.server_args)}
    except ValueError as error:
        raise StartError(f"--server-args: {error}") from error
    if options.slots is not None:
        common["slots"] = options.slots
    if options.ctx is not None:
        common["ctx"] = options.ctx
    if options.gpus is not None:
        common["replicas"] = options.gpus
        common["env"] = dict.fromkeys(_GPU_VARIABLES, REPLICA)
    return found | {"models": [_model(text) | common for text in options.model]}


def _model(text: str) -> dict[str, object]:
    """Return the model that one `--model` gives. Raises StartError."""
    name, equals, what = text.partition("=")
    if name[:1] in ("/", ".", "~") or not equals:  # a path may have "=", too
        name, what = "", text
    if what.startswith(_HF):
        source, usual = "hf", what.removeprefix(_HF).partition("/")[2].replace(":", "-")
        what = what.removeprefix(_HF)
    else:
        source, what = "model", str(Path(what).expanduser().absolute()) if what else ""
        usual = Path(what).name.removesuffix(".gguf")
    if not what or text.startswith("="):
        raise StartError(f"--model {text}: must be FILE, NAME=FILE or hf:USER/REPOSITORY:QUANT")
    if source == "model":
        _check_file(text, what)
    label = label_of(name or usual).strip("-")
    aliases = {"aliases": [name]} if name and name != label else {}
    return {"name": label, source: what, **aliases}


def _check_file(text: str, path: str) -> None:
    """Refuse what is surely no model file. Raises StartError. A file may come later."""
    if Path(path).is_dir():
        raise StartError(f"--model {text}: is a directory: `kvferry import {path}` reads all of it")
    if not path.endswith(".gguf") and not Path(path).exists():
        known = "USER/REPOSITORY:QUANT"
        with suppress(ValueError):
            known = hf_reference(text)
        told = f"no such file; a model of Hugging Face is written hf:{known}"
        raise StartError(f"--model {text}: {told}")


def add_fleet_options(command: argparse.ArgumentParser) -> None:
    """Add the flags to a command."""
    add = command.add_argument_group("other hosts").add_argument
    add(
        "--peer",
        action="append",
        default=[],
        metavar="URL",
        help="another host's --peer-listen; repeatable; a name may have several addresses",
    )
    add("--peer-listen", metavar="HOST:PORT", help="the address for other hosts; default: none")
    add("--redis", metavar="URL", help="a Redis or Valkey in which hosts find each other")
    add(
        "--fleet-credentials",
        metavar="DIR",
        help="what `kvferry fleet certificate` has made for this host",
    )
    add(
        "--insecure-peers", action="store_true", help="plain HTTP between hosts, for a safe network"
    )
    add("--host-name", metavar="NAME", help="the name of this host; default: the machine's")


def fleet_from(options: argparse.Namespace) -> dict[str, object] | None:
    """Return the `fleet` section for the flags; None: without any."""
    named = {key: flag.removeprefix("--").replace("-", "_") for key, flag in FLEET_FLAGS.items()}
    found = {key: value for key, flag in named.items() if (value := getattr(options, flag))}
    if options.peer:
        found["peers"] = options.peer
    if options.fleet_credentials:
        found["credentials"] = str(Path(options.fleet_credentials).absolute())
    return found or None
