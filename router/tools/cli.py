"""The command line of `kvferry`: options, commands, exit codes and error lines."""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from router import __version__
from router.assembly.backends import StartError
from router.assembly.router import serve
from router.base.api_keys import hash_text, new_key
from router.base.errors import KvError, RouterError
from router.config import values
from router.config.editor import print_schema
from router.config.schema import Config, ConfigError, from_flags, load
from router.core.model.policy import PolicyName
from router.telemetry.logs import set_up_logging
from router.tools.bench.command import add_options as add_bench_options
from router.tools.bench.command import bench
from router.tools.console import servers, snapshots, usage, warm
from router.tools.console.client import CallError, add_url
from router.tools.console.explain import explain
from router.tools.console.operations import drain, reload, undrain
from router.tools.console.top import top
from router.tools.doctor.check import check_text
from router.tools.fleet.command import add_fleet_commands
from router.tools.serving.flags import (
    add_fleet_options,
    add_server_options,
    fleet_from,
    for_all_servers,
    of_each_model,
    servers_from,
)
from router.tools.simulate import command as simulation

OK, CANNOT_WORK, BAD_INPUT = 0, 1, 2

_UNKNOWN = "unrecognized arguments: "  # argparse's words
# What those who know llama-server's flags type, and how to say it here.
_FLAGS_HERE = (
    {"-m": "--model FILE", "--models-preset": "--config with what `kvferry import FILE` prints"}
    | dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "--model hf:USER/REPOSITORY:QUANT")
    | dict.fromkeys(("-a", "--alias"), "--model NAME=FILE")
    | dict.fromkeys(("-c", "--ctx-size"), "--ctx N, for each slot")
    | dict.fromkeys(("-np", "--parallel"), "--slots N")
    | dict.fromkeys(("--host", "--port"), "--listen HOST:PORT")
    | dict.fromkeys(("--api-key", "--api-key-file"), "auth.keys in a file, made by `kvferry key`")
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `kvferry` command. Returns the exit code: 0 fine, 1 cannot work, 2 bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    _Parser.command = next(iter(words), "")
    if "--server-args" in words[:-1]:  # else a value such as "--jinja" is taken for a flag
        at = words.index("--server-args")
        words[at : at + 2] = [f"--server-args={words[at + 1]}"]
    parser = command_parser()
    if words[:1] == ["serve"]:
        _refuse_flags_of_servers(parser, words[1:])
    options = parser.parse_args(words)
    try:
        code: int = options.run(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except (RouterError, KvError, CallError) as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, CallError) and error.bad_input else CANNOT_WORK
    except OSError as error:
        print(f"kvferry: {error.strerror or error}", file=sys.stderr)
        return CANNOT_WORK
    except KeyboardInterrupt:
        return 130
    return code


def _refuse_flags_of_servers(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Exit if a flag of llama-server has another name here, which the error tells.

    Before `argparse` sees it: it would read `-hf` as `-h`, and print the help.
    """
    flags = [word.partition("=")[0] for word in words]
    told = [f"instead of {flag}: {here}" for flag, here in _FLAGS_HERE.items() if flag in flags]
    if told:
        parser.error("; ".join(told))


class _Parser(argparse.ArgumentParser):
    command = ""  # the one that was typed
    commands: Mapping[str, argparse.ArgumentParser] = {}

    def __init__(self, **options: Any) -> None:
        """Take no part of a flag for the flag: `--host` would be `--host-name`."""
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Refuse what was typed; of what may be llama-server's, say where it goes."""
        unknown = message.removeprefix(_UNKNOWN)
        if self.command == "serve" and unknown != message:
            message += f"; if llama-server knows them: --server-args {shlex.quote(unknown)}"
            if unknown.endswith(".gguf") and " " not in unknown:
                message = f"instead of {unknown}: --model {unknown}"
        elif unknown != message and self.command in self.commands:
            argparse.ArgumentParser.error(self.commands[self.command], message)
        super().error(message)


def command_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvferry",
        description="A reverse proxy that moves the KV of llama-servers to where it is needed.",
    )
    parser.add_argument("--version", action="version", version=f"kvferry {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _Parser.commands = commands.choices

    command = commands.add_parser("serve", help="run the router")
    _fleet_options(command)
    add_server_options(command)
    add_fleet_options(command)
    command.set_defaults(run=_serve)

    command = commands.add_parser("check", help="check a configuration file")
    either = command.add_mutually_exclusive_group(required=True)
    either.add_argument("file", type=Path, nargs="?", metavar="FILE")
    either.add_argument("--config", type=Path, metavar="FILE", help="the same, as for serve")
    command.set_defaults(run=_check)

    command = commands.add_parser("doctor", help="probe every backend and say what to change")
    _fleet_options(command)
    add_fleet_options(command)
    command.set_defaults(run=_doctor)

    command = commands.add_parser("bench", help="measure your own servers, in about a minute")
    _fleet_options(command)
    add_bench_options(command)
    command.set_defaults(run=lambda o: asyncio.run(bench(_with_backends(o), o)))

    command = commands.add_parser("explain", help="explain how and why a request was served")
    command.add_argument(
        "id", metavar="ID", help="x-kvferry-request-id of the response, or a prefix"
    )
    add_url(command)
    command.set_defaults(run=lambda options: explain(options.url, options.id))

    command = commands.add_parser("demo", help="start two llama-servers and show what kvferry does")
    command.add_argument("--model", type=Path, help="a .gguf file; default: fetch a small one")
    command.add_argument("--llama-server", metavar="PATH", help="the llama-server program")
    command.add_argument("--keep", action="store_true", help="keep running until Ctrl-C")
    command.set_defaults(run=_demo)

    command = commands.add_parser("key", help="make an API key for a client")
    command.add_argument("name", metavar="NAME", help="name of the key in the log")
    command.add_argument("--tenant", help="tenant of the key; default: NAME")
    command.set_defaults(run=_key)

    for act, doing in (
        (drain, "finish a backend's requests, save its KV, and stop using it"),
        (undrain, "use a backend again"),
    ):
        command = commands.add_parser(act.__name__, help=doing)
        command.add_argument("backend", metavar="NAME", help="its name in the configuration")
        add_url(command)
        command.set_defaults(run=lambda o, act=act: asyncio.run(act(o.url, o.backend)))

    command = commands.add_parser("reload", help="read the configuration file again")
    add_url(command)
    command.set_defaults(run=lambda options: asyncio.run(reload(options.url)))

    command = commands.add_parser("top", help="watch a running router")
    add_url(command)
    command.add_argument("--once", action="store_true", help="print once and exit, for scripts")
    command.set_defaults(run=_top)

    for name, add, doing in (
        ("snapshots", snapshots.add_options, "list, show and purge snapshots"),
        ("usage", usage.add_options, "show what tenants used, by day and model"),
        ("warm", warm.add_options, "compute and save a prompt ahead of use"),
        ("servers", servers.add_options, "list, start and stop servers on demand"),
        ("fleet", add_fleet_commands, "certificates, status and drain of hosts"),
        ("simulate", simulation.add_options, "simulate a trace or a workload"),
    ):
        add(commands.add_parser(name, help=doing))

    command = commands.add_parser(
        "import",
        help="translate what starts llama-servers today",
        description="Prints a configuration for a llama-swap file, presets of llama-server, a"
        " compose file, a systemd unit, a shell script or a directory of models, and says what is"
        " changed.",
    )
    command.add_argument("file", type=Path, metavar="FILE")
    command.set_defaults(run=_import)

    command = commands.add_parser("completion", help="print a script that completes commands")
    command.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    command.set_defaults(run=lambda options: _completion(parser, options.shell))

    command = commands.add_parser("schema", help="print the JSON Schema of the configuration")
    command.set_defaults(run=lambda _: print_schema())
    return parser


def _completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print the completion script of a shell. Returns 0."""
    import shtab  # no other command needs it

    for action in _actions(parser):
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, shell) + "\n")
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield each option and argument of a parser and of its commands."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other list
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action


def _fleet_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="FILE", help="a YAML file; see config/")
    command.add_argument(
        "--backend", action="append", default=[], metavar="URL", help="a llama-server; repeatable"
    )
    command.add_argument(
        "--kv-dir",
        type=lambda text: str(Path(text).expanduser().absolute()) if text else text,
        metavar="DIR",
        help="the servers' --slot-save-path, as seen from here; with --model: where to keep KV",
    )
    command.add_argument(
        "--listen",
        type=_listen,
        metavar="HOST:PORT",
        help="or unix:/PATH, or :PORT for all networks; default 127.0.0.1:8080",
    )
    command.add_argument("--policy", metavar="NAME", help=", ".join(PolicyName))


def _listen(text: str) -> str:
    """Return the address of a flag; `:9000` is on all networks, `9000` on this machine alone."""
    if text.removeprefix(":").isdecimal():
        host = "0.0.0.0" if text[0] == ":" else "127.0.0.1"  # noqa: S104 - it was asked for
        return f"{host}:{text.removeprefix(':')}"
    return text


def _config(options: argparse.Namespace) -> Config:
    """Load the configuration from the file or the flags. Raises ConfigError or StartError."""
    starts_servers = "server_args" in options
    if options.config is None:
        servers = servers_from(options) if starts_servers else None
        fleet = fleet_from(options) if "peer" in options else None
        return from_flags(
            options.backend, options.kv_dir, options.listen, options.policy, servers, fleet
        )
    lists = [f"--{name}" for name in ("backend", "model", "peer") if getattr(options, name, ())]
    if lists or (starts_servers and of_each_model(options)):
        lists += of_each_model(options) if starts_servers else []
        raise StartError(f"{', '.join(lists)}: not together with --config; set it in the file")
    return load(options.config, _over_file(options))


def _over_file(options: argparse.Namespace) -> dict[str, object]:
    """Return the keys of the flags that win over a file: those that name one value."""
    found = {key: getattr(options, key) for key in ("listen", "policy", "kv_dir")}
    if "server_args" in options:
        found["servers"] = for_all_servers(options)
    if "peer" in options:
        found["fleet"] = fleet_from(options)
    return {key: value for key, value in found.items() if value}


def _with_backends(options: argparse.Namespace) -> Config:
    """Load a configuration for a command that examines running servers. Raises StartError."""
    config = _config(options)
    if not config.backends:
        raise StartError(
            "this command examines llama-servers that run: give --backend URL; `kvferry servers"
            " list` names those that a router has started, and /kvferry/state has their URLs"
        )
    return config


def _serve(options: argparse.Namespace) -> int:
    config = _config(options)
    set_up_logging(config.logging)
    _run(serve(config, options.config, _over_file(options) if options.config else {}))
    return OK


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop: it cuts the router's cost of a request by a third."""
    import uvloop

    uvloop.run(work)


def _check(options: argparse.Namespace) -> int:
    code, text = check_text(options.file or options.config)
    print(text, file=sys.stdout if code == OK else sys.stderr)
    return code


def _doctor(options: argparse.Namespace) -> int:
    from router.tools.doctor.command import doctor

    return asyncio.run(doctor(_with_backends(options)))


def _import(options: argparse.Namespace) -> int:
    from router.tools.serving.entries import ImportProblemError
    from router.tools.serving.imports import imported, summary

    try:
        made = imported(options.file)
    except (OSError, UnicodeDecodeError, ImportProblemError) as error:
        told = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise CallError(
            f"{options.file}: {getattr(error, 'strerror', told)}", bad_input=True
        ) from error
    print(made.text, end="")
    if not sys.stdout.isatty():  # the text begins with the same
        print("\n".join(summary(made)), file=sys.stderr)
    return OK


def _key(options: argparse.Namespace) -> int:
    tenant = options.tenant or options.name
    for name in (options.name, tenant):
        try:
            values.name(name)
        except ValueError as error:
            print(f"kvferry: {name!r} {error}", file=sys.stderr)
            return BAD_INPUT
    key = new_key()
    print(f"Give this key to the client; kvferry does not store it:\n\n  {key}\n")
    print("Add to the configuration, under `auth: keys:`\n")
    print(f"    - {{name: {options.name!r}, tenant: {tenant!r},")
    print(f"       hash: '{hash_text(key)}'}}")
    return OK


def _top(options: argparse.Namespace) -> int:
    try:
        return asyncio.run(top(options.url, once=options.once))
    except KeyboardInterrupt:  # Ctrl-C is the normal way to quit
        return OK


def _demo(options: argparse.Namespace) -> int:
    from router.tools.demo.demo import demo

    return asyncio.run(demo(options.model, options.llama_server, keep=options.keep))
