"""Read the start command of a llama-server, and return what kvferry starts in its place.

Wrappers stay around it: words before the program, the text of a shell, a container.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import basename
from pathlib import Path
from typing import Any

from router.config.llama_flags import USUAL, Flags, flags_of
from router.config.servers import OWN_FLAGS
from router.servers.launch import SECRET
from router.servers.program import ServerNotFoundError, find_server

Json = dict[str, Any]

_PORT, _KV_DIR, _LOCAL = "${port}", "${kv_dir}", "127.0.0.1"
_NAME = r"llama[-_]server[\w.-]*"  # also llama-server-cuda, llama-server.exe
SERVER = re.compile(rf"(?:[^;&|]*[/\\])?{_NAME}", re.IGNORECASE)
_IN_TEXT = re.compile(rf"(?<![^\s;&(])[^\s;&('\"]*{_NAME}")
IMAGE = re.compile(r"llama[-_.]?(?:cpp|server)", re.IGNORECASE)
# Options of `docker run` without a value; all others take one. A server has no terminal.
_TERMINAL = re.compile(r"-[dit]+|--(?:detach|interactive|tty)")
_BARE = re.compile(
    r"-[Pq]|-[pve].+|--(?:rm|rmi|init|privileged|read-only|quiet|publish-all|replace|no-healthcheck)|.*=.*"
)
_OF_A_MODEL = re.compile(r"--[\w.-]+-(?:default|spec)")  # --gpt-oss-20b-default
_SLOTS = 4  # without -np: four slots that share their cells (server.cpp:168-173)
# Replaced without a loss. Other flags that kvferry sets itself are told of.
_SAME = {"--host", "--port", "--slot-save-path", "--cache-ram", "--no-slots", "--api-key-file"}
_SAME |= {"--ssl-key-file", "--ssl-cert-file"}
_WHY = {
    "--cache-reuse": "kvferry reuses more, and chunks that were moved could not be saved",
    "--api-key": "it lets clients into kvferry (`auth: keys`)",
    "--api-prefix": "a proxy in front of kvferry may add one",
}


class UntranslatableError(ValueError):
    """What cannot be taken over; the message says why."""


@dataclass(slots=True)
class ServerFlags:
    """What the flags of a llama-server say. `n_ctx` and `n_slots` 0: nothing."""

    source: list[str] = field(default_factory=list)  # the flag that names the model, its value
    names: list[str] = field(default_factory=list)
    n_ctx: int = 0
    n_slots: int = 0
    unified: bool = False
    idle_s: int = 0  # until it sleeps
    listens: dict[str, str] = field(default_factory=dict)
    router: dict[str, str] = field(default_factory=dict)  # flags of router mode
    args: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)  # that its container publishes

    @property
    def sizes(self) -> Json:
        """Return slots and context: as much for one prompt as before."""
        if self.n_slots == 1:
            return {"slots": 1, "ctx": self.n_ctx}
        if self.unified or not self.n_slots or not self.n_ctx:
            return {"slots": self.n_slots or _SLOTS, "ctx": self.n_ctx, "kv_unified": True}
        return {"slots": self.n_slots, "ctx": max(self.n_ctx // self.n_slots, 1)}

    def words(self, host: str, port: str) -> list[str]:
        """Return the flags for a `command`, those of kvferry behind the server's own."""
        sizes = self.sizes
        cells = sizes["ctx"] if "kv_unified" in sizes else sizes["ctx"] * sizes["slots"]
        unified = "--kv-unified" if "kv_unified" in sizes else "--no-kv-unified"
        return [
            *(*self.source, *self.args, "--host", host, "--port", port),
            *("-np", str(sizes["slots"]), "-c", str(cells), unified, "--cache-ram", "0"),
            *("--slot-save-path", _KV_DIR, "--slots", "--metrics"),
        ]


class Commands:
    """The translation of commands. `note` is told what is changed, and why."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        """Set up for a file in `folder`, which relative paths begin with."""
        self.folder, self.note = folder, note
        self._flags: dict[str, Flags | None] = {}

    def translated(self, words: Sequence[str], env: dict[str, str]) -> tuple[Json, ServerFlags]:
        """Return the keys of a model, and what its flags say. Raises UntranslatableError.

        Variables that stand for flags are taken out of `env`, and assignments put into it.
        """
        words = list(words)
        while words and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
            env[found[1]] = found[2]
            words.pop(0)
        first = basename(words[0]) if words else ""
        if first == "env" and "=" in "".join(words[1:2]):
            return self.translated(words[1:], env)
        if _is_container(words):
            return self._container(words)
        if _text_at(words):
            return self._shell(words, env)
        at = next((at for at, word in enumerate(words) if SERVER.fullmatch(word)), None)
        if at is None:
            raise UntranslatableError(f"{first or 'nothing'} is no llama-server")
        return self._native(words[:at], words[at], words[at + 1 :], env)

    def _native(
        self, before: list[str], program: str, rest: list[str], env: dict[str, str]
    ) -> tuple[Json, ServerFlags]:
        if before and basename(before[0]) in ("ssh", "mosh"):
            raise UntranslatableError(
                "it runs on another machine: start kvferry there, or name its URL in `backends`"
            )
        found = self._program(program)
        server = self.flags(rest, env, self._flags_of(found))
        name, value = server.source or ("", "")
        is_own = name not in ("--model", "--hf-repo") or "--hf-file" in server.args
        keys: Json = {}
        if found or before or is_own:  # kvferry starts these words as they are
            own = [*before, *([found] if found else _found_here())]
            if is_own:
                return {"command": [*own, *server.words(_LOCAL, _PORT)]}, server
            keys = {"llama_server": own}
        keys |= {"model": self._path(value)} if name == "--model" else {"hf": value}
        return keys | server.sizes | ({"args": server.args} if server.args else {}), server

    def _shell(self, words: list[str], env: dict[str, str]) -> tuple[Json, ServerFlags]:
        at = _text_at(words)
        text = words[at]
        for program in _IN_TEXT.finditer(text):
            end = end_of_command(text, program.end())
            with suppress(UntranslatableError):  # of `cd llama-server-1`, `pkill llama-server`
                server = self.flags(shlex.split(text[program.end() : end]), env, None)
                break
        else:
            raise UntranslatableError("the text of its shell starts no llama-server with a model")
        own = " ".join(map(_quoted, server.words(_LOCAL, _PORT)))
        text = f"{text[: program.end()]} {own} {text[end:]}".rstrip()
        return {"command": [*words[:at], text, *words[at + 1 :]]}, server

    def _container(self, words: list[str]) -> tuple[Json, ServerFlags]:
        at = words.index("run") + 1
        run, options, env = words[:at], list[str](), dict[str, str]()
        own_net, ports, key = True, list[str](), ""
        while at < len(words) and words[at].startswith("-"):
            bare = _BARE.fullmatch(words[at]) or _TERMINAL.fullmatch(words[at])
            given = words[at : at + (1 if bare else 2)]
            at += len(given)
            name, value = given if len(given) == 2 else given[0].partition("=")[::2]
            if len(given) == 1 and name[:2] in ("-p", "-e", "-v") and len(given[0]) > 2:
                name, value = given[0][:2], given[0][2:]
            own_net = own_net and (name, value) not in (("--network", "host"), ("--net", "host"))
            if name in ("-e", "--env") and value.startswith("LLAMA_ARG_"):
                env |= [value.partition("=")[::2]]
            elif name in ("-e", "--env") and value.startswith("LLAMA_API_KEY="):
                key = value.partition("=")[2]
            elif name in ("-p", "--publish"):
                ports.append(value)
            elif name in ("-e", "--env") and SECRET.search(value.partition("=")[0].upper()):
                options += [name, value.partition("=")[0]]  # of kvferry's own environment
                self.note(f"the value of {options[-1]} is left out: set it for kvferry itself")
            elif not _TERMINAL.fullmatch(name):
                options += given
        image, rest = words[at : at + 1], words[at + 1 :]
        full = rest[:1] == ["--server"] or (":full" in "".join(image) and rest[:1] == ["-s"])
        is_program = full or (rest and SERVER.fullmatch(rest[0]))
        program = [rest.pop(0)] if is_program else []
        if not image or not (program or IMAGE.search(image[0])):
            raise UntranslatableError(f"the container {''.join(image)} is no llama-server")
        server = self.flags(rest, env, None)
        server.ports = ports
        server.listens["--api-key"] = ",".join([server.listens.get("--api-key", ""), key])
        port = server.listens.get("--port", "")
        port = (port if port.isdecimal() else "8080") if own_net else _PORT
        options += ["-p", f"{_LOCAL}:{_PORT}:{port}"] if own_net else []
        options += ["-e", "LLAMA_API_KEY", "-v", f"{_KV_DIR}:{_KV_DIR}"]
        flags = server.words("0.0.0.0" if own_net else _LOCAL, port)  # noqa: S104 - inside
        return {"command": [*run, *options, *image, *program, *flags]}, server

    def _program(self, named: str) -> str:
        """Return a program that is on this machine; "": kvferry's own is used."""
        path = str(self.folder / Path(named).expanduser()) if "/" in named else named
        if named in ("llama-server", "llama-server.exe") or shutil.which(path) is None:
            if "/" in named:
                self.note(f"{named} is not here: the llama-server that kvferry finds is used")
            return ""
        return path

    def _flags_of(self, program: str) -> Flags | None:
        """Return the flags of a program, or of kvferry's own; None: it does not tell them."""
        if program and not _is_binary(program):
            return None  # nothing that the file's folder has is run
        if program not in self._flags:
            try:
                self._flags[program] = flags_of([program] if program else find_server())
            except ServerNotFoundError:
                self._flags[program] = None
        return self._flags[program]

    def flags(self, words: Sequence[str], env: dict[str, str], known: Flags | None) -> ServerFlags:
        """Read flags. `known`: all that the server knows; None: not told.

        Raises UntranslatableError.
        """
        flags, server, rest = known or USUAL, ServerFlags(), list[str]()
        for name in [name for name in env if name.startswith("LLAMA_ARG_")]:
            value = env.pop(name)
            given = flags.words_of(name, value) if value else None
            if given is None:
                self.note(f"{name} is left out: it is {'no flag' if value else 'empty'}")
            rest += given or []
        rest += words
        while rest:
            word = rest.pop(0)
            flag, (short, equals, value) = flags.of(word), word.partition("=")
            if flag is None:
                other = USUAL.of(word)
                takes = bool(other and other.value) or (other is None and word[:1] == "-")
                given = [word, rest.pop(0)] if takes and not equals and _is_value(rest) else [word]
                if known is None:
                    server.args += given
                else:
                    self.note(f"{given[0]} is left out: this llama-server has no such flag")
                continue
            if flag.value and not equals:
                if not rest or flags.of(rest[0]) is not None:
                    if "on|off" not in flag.value:
                        raise UntranslatableError(f"{word} has no value")
                    value = "on"  # what it meant when it took none
                else:
                    value = rest.pop(0)
            two = [rest.pop(0)] if flag.value == "START END" and rest else []
            self._take(server, flags.name_of(word), short, value if flag.value else None, two)
        if not (server.source or server.router or any(map(_OF_A_MODEL.fullmatch, server.args))):
            raise UntranslatableError("it names no model")
        return server

    def _take(
        self, server: ServerFlags, name: str, word: str, value: str | None, two: list[str]
    ) -> None:
        if name in ("--parallel", "--ctx-size"):
            if not re.fullmatch(r"-?\d+", value or ""):
                raise UntranslatableError(f"{word} has no number: {value!r}")
            which = "n_slots" if name == "--parallel" else "n_ctx"
            setattr(server, which, max(int(value or 0), 0))
        elif name in ("--model", "--hf-repo", "--model-url", "--docker-repo"):
            server.source = [name, value or ""]
        elif name == "--sleep-idle-seconds":
            server.idle_s = int(value) if value and value.isdecimal() else 0
        elif name == "--alias":
            server.names = [one.strip() for one in (value or "").split(",") if one.strip()]
        elif name.startswith("--models-"):
            server.router[name] = value or ""
        elif name in ("--kv-unified", "--no-kv-unified"):
            server.unified = name == "--kv-unified"
        elif name in OWN_FLAGS or name == "--cache-reuse":
            server.listens[name] = value or ""
            if name not in _SAME:
                self.note(f"{word} is left out: {_WHY.get(name, 'kvferry sets it itself')}")
        elif name == "--hf-token":
            self.note(f"{word} is left out, which is a secret: name HF_TOKEN in `env`")
        elif name not in ("--slots", "--metrics"):
            value = value and self._path(value, exists=True)
            server.args += [word, *([] if value is None else [value]), *two]

    def tls(self, server: ServerFlags) -> Json:
        """Return the files that a server encrypts with, as kvferry's `tls` has them."""
        found = {"certificate": "--ssl-cert-file", "key": "--ssl-key-file"}
        given = {key: server.listens.get(flag, "") for key, flag in found.items()}
        return {key: self._path(one) for key, one in given.items()} if all(given.values()) else {}

    def keys(self, server: ServerFlags, env: dict[str, str]) -> list[str] | None:
        """Return the keys that clients of a server have; None: their file cannot be read.

        The variable that has one is taken out of `env`.
        """
        own = f"{server.listens.get('--api-key', '')},{env.pop('LLAMA_API_KEY', '')}".split(",")
        if file := server.listens.get("--api-key-file"):
            try:
                own += Path(self._path(file)).read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError):
                return None
        return [one for one in own if one]

    def _path(self, text: str, *, exists: bool = False) -> str:
        """Return a path from the root; with `exists` only if there is such a file."""
        path = self.folder / Path(text).expanduser() if text else self.folder
        is_name = "/" in text or "." in text
        return text if exists and not (is_name and path.is_file()) else str(path)


def _found_here() -> list[str]:
    """Return the command of the llama-server that kvferry finds, or its usual name."""
    try:
        return find_server()
    except ServerNotFoundError:
        return ["llama-server"]


def _is_binary(program: str) -> bool:
    """Return whether a program is a llama-server, and no script."""
    found = shutil.which(program)
    if found is None or basename(program) not in ("llama-server", "llama-server.exe"):
        return False
    with open(found, "rb") as file:
        return file.read(2) != b"#!"


def runs_another(words: Sequence[str]) -> bool:
    """Return whether a command starts a container, or a shell with a text."""
    return _is_container(words) or _text_at(words) > 0


def _is_container(words: Sequence[str]) -> bool:
    engines = ("docker", "podman", "nerdctl")
    return "run" in words and basename(words[0]) in engines


def _text_at(words: Sequence[str]) -> int:
    """Return where the text of a shell is (`bash -lc TEXT`); 0: there is none."""
    shells = [
        at for at, word in enumerate(words) if basename(word) in ("sh", "bash", "zsh", "dash")
    ]
    for at in range(shells[0] + 1 if shells else len(words), len(words) - 1):
        if re.fullmatch(r"-[a-z]*c", words[at]):
            return at + 1
    return 0


def _is_value(rest: Sequence[str]) -> bool:
    return bool(rest) and (not rest[0].startswith("-") or bool(re.match(r"-\d", rest[0])))


def _quoted(word: str) -> str:
    """Quote a word for a shell, which fills in its variables."""
    if "$" not in word:
        return shlex.quote(word)
    return word if word in (_PORT, _KV_DIR) else '"' + word.replace('"', '\\"') + '"'


def end_of_command(text: str, start: int) -> int:
    """Return where a simple command ends in the text of a shell."""
    depth = 0
    for at, char in unquoted(text, start):
        if char == "(":
            depth += 1
        elif char == ")" and depth:
            depth -= 1
        elif char in ";&|<>\n)" and not depth:
            return at - 1 if char == ">" and text[at - 1].isdigit() else at
    return len(text)


def unquoted(text: str, at: int = 0) -> Iterator[tuple[int, str]]:
    """Yield position and character of what no quote and no backslash protects in a shell."""
    quote = ""
    while at < len(text):
        char = text[at]
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char != "\\":
            yield at, char
        at += 2 if char == "\\" and quote != "'" else 1


def without_comments(text: str) -> str:
    """Return the text of a shell without its comments, which may hold quotes."""
    at = 0
    while at >= 0:
        marks = (i for i, char in unquoted(text, at) if char == "#")
        at = next((i for i in marks if i == 0 or text[i - 1].isspace()), -1)
        if at >= 0:
            text = text[:at] + "".join(text[at:].partition("\n")[1:])
    return text


def statements(text: str) -> Iterator[str]:
    """Yield the simple commands of a shell's text, without what they redirect."""
    at, whole = 0, ""
    while at < len(text):
        end = end_of_command(text, at)
        whole += text[at:end]
        if target := re.match(r"\d?[<>]+&?\s*[^\s;&|]+", text[end:]):
            at = end + target.end()
            continue
        yield whole.strip()
        at, whole = end + 1, ""
    yield whole.strip()


def split(text: str) -> list[str]:
    """Return the words of a statement; none if a quote of it is closed in another one."""
    try:
        return shlex.split(text)
    except ValueError:
        return []
