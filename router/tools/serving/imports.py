"""`kvferry import FILE`: what starts llama-servers today, as a configuration of kvferry.

Takes a llama-swap file, presets of llama-server (`--models-preset`), a compose file, a systemd
unit, a `.container` file of podman or a shell script, and finds out which it is. What is changed or
left out is said, by model.
"""

import configparser
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from router.config.filters import KEPT
from router.config.llama_flags import USUAL
from router.config.values import label_of
from router.tools.serving.commands import (
    IMAGE,
    SERVER,
    Json,
    ServerFlags,
    UntranslatableError,
    runs_another,
    split,
    statements,
    without_comments,
)
from router.tools.serving.containers import folders, mounted, published, short_port
from router.tools.serving.entries import Entries, Imported, ImportProblemError, free
from router.tools.serving.variables import (
    Untold,
    calculated,
    chosen_in_cases,
    expanded,
    filled,
    pairs,
    read_file,
    with_folders,
    words_of,
)

_ASSIGNMENT = re.compile(
    r"(?:(?:then|else|do|export|local|readonly|declare)\s+(?:-\w+\s+)*)*"
    r"'?([A-Za-z_]\w*)(\+?)=(\(.*\)|.*)",
    re.DOTALL,
)
_DRAFT = re.compile("(?:mtp|dspark|dflash)-")  # a draft beside its model (preset.cpp)
_OF_A_UNIT = re.compile(r"^[ \t]*(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
# Words before the program of a command.
_BEFORE = ("exec", "eval", "command", "nohup", "time", "sudo", "do", "then", "else", "{")
# Of a service's file of variables: what its server reads. Others may be secrets.
_OF_A_SERVER = re.compile(r"LLAMA_|GGML_|CUDA_|HIP_|ROCR_|HSA_|VK_|OMP_|HF_(?!TOKEN)|NVIDIA_")
# Keys of a llama-swap model that change nothing here, or are read below.
_READ = {
    *("cmd", "cmdStop", "proxy", "name", "description", "checkEndpoint", "useModelName", "macros"),
    *("aliases", "env", "ttl", "filters", "metadata", "capabilities", "timeouts"),
    *("unlisted", "concurrencyLimit"),
}


class _Loader(yaml.SafeLoader):
    """YAML as Go reads it: `on` and `yes` are texts."""


_Loader.yaml_implicit_resolvers = {
    first: [one for one in found if one[0] != "tag:yaml.org,2002:bool" or first in "tTfF"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def imported(path: Path) -> Imported:
    """Return the configuration for a file, or for a directory of .gguf files. Blocking.

    Raises ImportProblemError, and OSError or UnicodeDecodeError if it cannot be read.
    """
    made = _Import(path.resolve())
    if path.is_dir():
        made.files(path.resolve(), [], {})
        return made.result()
    text = path.read_text("utf-8-sig")
    document: Any = None
    if not text.startswith("#!"):
        try:
            document = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        except yaml.YAMLError as error:
            if path.suffix in (".yaml", ".yml"):
                raise ImportProblemError(f"it is not YAML: {error}") from error
    try:
        if isinstance(document, dict) and isinstance(document.get("services"), dict):
            made.compose(document["services"])
        elif isinstance(document, dict) and isinstance(document.get("models"), dict):
            made.llama_swap(document)
        elif re.search(r"^\[Container\]\s*$", text, re.MULTILINE):
            made.quadlet(text)
        elif re.search(r"^\s*ExecStart\s*=", text, re.MULTILINE):
            made.unit(text)
        elif re.search(r"^\[[^\]\n]+\][ \t]*$", text, re.MULTILINE) and "\nif [" not in text:
            made.presets(text, [], {})
        else:
            made.script(text)
    except ImportProblemError:
        raise
    except (ValueError, AttributeError, TypeError, RecursionError, KeyError) as error:
        raise ImportProblemError(f"it cannot be read: {error}") from error
    return made.result()


class _Import(Entries):
    """Reads the formats of files; each method takes over one."""

    def llama_swap(self, document: Json) -> None:
        """Take over a configuration of llama-swap."""
        macros = document.get("macros") or {}
        ttl = document.get("globalTTL") or 0
        within = document.get("healthCheckTimeout")
        more: Json = {"start_timeout": f"{max(int(within), 15)}s"} if within else {}
        self.keep_names(map(str, document["models"]))
        for name, given in document["models"].items():
            self._name, entry = str(name), given if isinstance(given, dict) else {}
            try:
                own = macros | (entry.get("macros") or {}) | {"MODEL_ID": name, "PORT": "${port}"}
                whole = {k: filled(v, own, drop_comments=k in ("cmd", "cmdStop"))
                         for k, v in entry.items() if k != "macros"}  # fmt: skip
                self._llama_swap_model(str(name), whole, dict(more), ttl)
            except (UntranslatableError, ValueError, TypeError, AttributeError) as error:
                self.note(f"is left out: {error}")
        self._name = ""
        routing = (document.get("routing") or {}).get("router") or {}
        settings = routing.get("settings") or {}
        self._groups(document.get("groups") or settings.get("groups") or {})
        if document.get("matrix") or settings.get("matrix"):
            self.note("matrix is left out: one model is loaded at a time; raise `loaded`")
        for name in document.get("peers") or {}:
            self.note(f"the peer {name} is left out: kvferry serves llama-servers only")
        wanted = ((document.get("hooks") or {}).get("on_startup") or {}).get("preload") or ()
        for model in self.models.values():
            names = {model["name"], *model.get("aliases", ())}
            if names & {str(one) for one in wanted}:
                model["preload"] = True
        for key in document.get("apiKeys") or ():
            try:
                self.let_in(filled(str(key), macros))
            except UntranslatableError as error:
                self._misses_keys = True
                self.note(f"a key of apiKeys is left out: {error}; put it into `auth`")

    def _llama_swap_model(self, name: str, entry: Json, more: Json, ttl: float) -> None:
        if not entry.get("cmd"):
            raise UntranslatableError("it has no cmd: what it passes on to is not started here")
        for key in [key for key in entry if key not in _READ]:
            self.note(f"{key} is left out: kvferry has no such key")
        aliases = entry.get("aliases") or []
        ids = [one.get("id") if isinstance(one, dict) else str(one)
               for one in ([aliases] if isinstance(aliases, str | dict) else aliases)]  # fmt: skip
        more["aliases"] = [one for one in ids if one]
        given = entry.get("ttl")
        idle_s = ttl if given is None or int(given) < 0 else int(given)
        more |= {"ttl": f"{idle_s}s"} if idle_s else {}
        if (limit := int(entry.get("concurrencyLimit") or 0)) > 0:
            more["max_running"] = limit
        if entry.get("unlisted"):
            self.note("unlisted is left out: /v1/models has every model")
        if stop := entry.get("cmdStop"):
            if "${PID}" in stop:
                self.note("cmdStop is left out: a process gets SIGTERM")
            else:
                more["stop_command"] = shlex.split(stop)
        if re.search(r"\b[A-Za-z]:\\", entry["cmd"]):
            raise UntranslatableError("its paths are those of Windows, where no kvferry runs")
        env = pairs(entry.get("env") or ())
        if self.add(name, shlex.split(entry["cmd"]), env, more):
            self._filters(name, entry.get("filters") or {})

    def _filters(self, name: str, given: Json) -> None:
        """Take over the fields that a model's requests get and lose, and names with their own."""
        stripped = str(given.get("stripParams") or given.get("strip_params") or "")
        strip = [word.strip() for word in stripped.split(",")]
        by_name = {name: given.get("setParams") or {}}
        by_name |= {filled(k, {"MODEL_ID": name}): v for k, v in
                    (given.get("setParamsByID") or {}).items()}  # fmt: skip
        for one, its_own in by_name.items():
            fields = by_name[name] | its_own
            for key in [key for key in fields if key in KEPT]:
                self.note(f"setParams: {key} is left out: no filter changes it")
            told = {"strip": [key for key in strip if key and key not in KEPT],
                    "set": {k: v for k, v in fields.items() if k not in KEPT}}  # fmt: skip
            told = {key: value for key, value in told.items() if value}
            if told or one != name:
                label = self.models[name]["name"]
                other = {} if one == name else {"model": label}
                entry = {"name": label if one == name else one} | other | told
                self.more.setdefault("filters", []).append(entry)

    def _groups(self, groups: Json) -> None:
        if not groups:
            self.servers["loaded"] = 1  # without groups, llama-swap loads one model at a time
            return
        rest, found = dict(self.models), list[Json]()
        for name, group in groups.items():
            names = map(str, group.get("members") or ())
            members = [rest.pop(one) for one in names if one in rest]
            label = free(label_of(str(name)), [one["name"] for one in found])
            swap, persistent = group.get("swap", True), group.get("persistent", False)
            if not members:
                continue
            for member in members:
                member["group"] = label
                if persistent and not swap and "ttl" not in member:
                    member["keep"] = True
            if group.get("exclusive", True) and not persistent and len(groups) > 1:
                self.note(f"group {name}: to unload other groups for it, set `loaded` for all")
            found.append({"name": label, "loaded": 1 if swap else len(members)})
        if rest:
            others = free("others", [one["name"] for one in found])
            found.append({"name": others, "loaded": 1})
            for model in rest.values():
                model["group"] = others
        self.servers["groups"] = found

    def router(self, server: ServerFlags, env: dict[str, str]) -> None:
        """Take over the models of llama-server's router mode, whose other flags all of them get."""
        base = list(server.args)
        base += ["-c", str(server.n_ctx)] if server.n_ctx else []
        base += ["-np", str(server.n_slots)] if server.n_slots else []
        folder = self._commands.folder
        self._loaded(server)
        if named := server.router.get("--models-preset"):
            self.presets((folder / named).read_text("utf-8-sig"), base, env)
        if named := server.router.get("--models-dir"):
            self.files(folder / named, base, env)

    def _loaded(self, server: ServerFlags) -> None:
        """Take over how many models a router loads at a time."""
        self.servers.pop("loaded", None)
        if (most := server.router.get("--models-max", "4")) != "0":
            self.servers["loaded"] = int(most)

    def files(self, folder: Path, base: list[str], env: dict[str, str]) -> None:
        """Take over a directory of models, as `--models-dir` does; also one of LM Studio."""
        for path in sorted(folder.iterdir()):
            found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
            beside = [one for one in found if "mmproj" in one.name or _DRAFT.match(one.name)]
            models = [one for one in found if one.suffix == ".gguf" and one not in beside]
            models = [one for one in models if not re.search(r"-0000[2-9]-of-|-000[1-9]", one.name)]
            if models and (path.is_dir() or not beside):
                flags = {"--mmproj" if "mmproj" in one.name else "--spec-draft-model": str(one)
                         for one in reversed(beside)}  # fmt: skip
                more = [word for pair in flags.items() for word in pair]
                words = ["llama-server", "-m", str(models[0]), *base, *more]
                self.add(path.name.removesuffix(".gguf"), words, dict(env), {})
            elif path.is_dir() and not found:
                self.files(path, base, env)

    def presets(self, text: str, base: list[str], env: dict[str, str]) -> None:
        """Take over presets of router mode: a section for each model, `[*]` for all."""
        parser = configparser.ConfigParser(
            default_section="*", interpolation=None, strict=False, allow_no_value=True,
            delimiters=("=",), inline_comment_prefixes=(";", "#"), empty_lines_in_values=False,
        )  # fmt: skip
        setattr(parser, "optionxform", str)  # noqa: B010 - keys keep their case
        try:
            parser.read_string(text if text.lstrip().startswith("[") else f"[default]\n{text}")
        except configparser.Error as error:
            raise ImportProblemError(f"it is no file of presets: {error}") from error
        common, server = parser.defaults(), ServerFlags()
        for key in [*common]:
            if (flag := USUAL.of_key(key)) and flag.name.startswith("--models-"):
                server.router[flag.name] = common[key] or ""
                parser.remove_option("*", key)
        if server.router or "loaded" not in self.servers:
            self._loaded(server)
        self.keep_names(parser.sections())
        for name in parser.sections():
            given = {key: value or "" for key, value in parser[name].items() if key != "version"}
            own = {key for key, value in given.items() if (common.get(key) or "") != value}
            theirs = {flag.name for key in own if (flag := USUAL.of_key(key))}
            keys = {
                key: value
                for key, value in sorted(given.items(), key=lambda one: one[0] in own)
                if key in own or (flag := USUAL.of_key(key)) is None or flag.name not in theirs
            }
            self._name, words, more = name, ["llama-server", *base], dict[str, Any]()
            if name == "default" and not keys.keys() - common.keys():
                continue  # of what stands before all sections
            if keys.pop("load-on-startup", "").lower() in ("true", "on", "1", "enabled"):
                more["preload"] = True
            if seconds := keys.pop("stop-timeout", ""):
                more["stop_timeout"] = f"{seconds}s"
            named = {flag.name for key in keys if (flag := USUAL.of_key(key))}
            if not named & {"--model", "--hf-repo", "--model-url"} and "/" in name:
                words += ["-hf", name]
            for key, value in keys.items():
                if (flagged := USUAL.words_of(key, value)) is None:
                    self.note(f"{key} is left out: it is no flag of llama-server")
                words += flagged or []
            # llama-server answers to the tag of a repository in capitals.
            more["aliases"] = [re.sub(":.*", lambda tag: tag[0].upper(), name)]
            self.add(name, words, dict(env), more)

    def compose(self, services: Json) -> None:
        """Take over the services of a compose file that start llama-servers, without containers."""
        known = dict(os.environ)
        known = read_file(self._commands.folder / ".env", known) | known
        for name, service in services.items():
            self._name = str(name)
            try:
                self._service(str(name), service, known)
            except (UntranslatableError, ValueError, TypeError, AttributeError) as error:
                self.note(f"is left out: {error}")

    def _service(self, name: str, service: Json, known: dict[str, str]) -> None:
        env = service.get("environment") or {}
        env = env if isinstance(env, dict) else pairs(env)
        env = {k: known.get(k, "") if v is None else str(v) for k, v in env.items()}
        env = {k: v for k, v in env.items() if v}
        env = {key: expanded(value, known) for key, value in env.items()}
        files = service.get("env_file") or ()
        for one in reversed([files] if isinstance(files, str | dict) else files):
            file = str(one.get("path")) if isinstance(one, dict) else str(one)
            found = read_file(self._commands.folder / file, known)
            env = {key: found[key] for key in found if _OF_A_SERVER.match(key)} | env
            if others := [key for key in found if not _OF_A_SERVER.match(key)]:
                self.note(f"of {file} are left out: {', '.join(others)}")
        words = [*_listed(service.get("entrypoint")), *_listed(service.get("command"))]
        image = expanded(str(service.get("image") or ""), known)
        if runs_another(words):  # /bin/sh -c "llama-server ..."
            texts = (split(one) for word in words for one in statements(word))
            words = next((one for one in texts if any(map(SERVER.fullmatch, one))), words)
            words = words[words[:1] == ["exec"] :]
        if not any(map(SERVER.fullmatch, words)):
            if not IMAGE.search(image):
                return
            if words[:1] == ["--server"] or (":full" in image and words[:1] == ["-s"]):
                words.pop(0)
            words = ["llama-server", *words]
        mounts = folders(service.get("volumes") or (), self._commands.folder, known)
        words = [mounted(expanded(word, known), mounts) for word in words]
        env = {key: mounted(env[key], mounts) for key in env}
        for devices in re.findall(r"device_ids': \[([^\]]*)\]", str(service.get("deploy"))):
            env["CUDA_VISIBLE_DEVICES"] = re.sub(r"[' ]", "", devices)
        server = self.add(name, words, env, {"preload": True})
        if server is None:
            return
        if image:
            self.note(f"it runs without its container {image}; `command` may start that")
        server.ports = [expanded(short_port(one), known) for one in service.get("ports") or ()]
        if service.get("network_mode") == "host":
            self._listen_as(server)
        elif where := published(server.ports, server):
            self.more.setdefault("listen", where)

    def quadlet(self, text: str) -> None:
        """Take over a container of podman's units (`NAME.container`), as a service of compose."""
        found: dict[str, list[str]] = {}
        for key, value in _settings(text):
            found.setdefault(key, []).append(value)
        service = {
            "image": "".join(found.get("Image", ())[-1:]),
            "entrypoint": "".join(found.get("Entrypoint", ())[-1:]),
            "command": "".join(found.get("Exec", ())[-1:]),
            "environment": shlex.split(" ".join(found.get("Environment", ()))),
            "env_file": found.get("EnvironmentFile", ()),
            "volumes": [*found.get("Volume", ()), *map(_mount, found.get("Mount", ()))],
            "ports": found.get("PublishPort", ()),
            "network_mode": "".join(found.get("Network", ())[-1:]),
        }
        self._service(self._path.stem, service, dict(os.environ))

    def unit(self, text: str) -> None:
        """Take over a systemd unit: its environment and its command, as a script has them."""
        lines: list[str] = []
        instance = self._path.stem.partition("@")[2]
        if re.search("%[iIjJ]", text) and not instance:
            named = f"{self._path.stem.rstrip('@')}@INSTANCE.service"
            raise ImportProblemError(
                "%i stands for the instance of a template unit: copy the file to one that has the"
                f" instance in its name, such as {named}"
            )
        for key, value in _settings(re.sub("%[iI]", instance, text)):
            if key in ("Environment", "EnvironmentFile"):
                file = Path(value.lstrip("-"))
                if key == "EnvironmentFile" and not file.is_file():
                    self.note(f"EnvironmentFile={value} is left out: there is no such file")
                told = pairs(shlex.split(value)) if key == "Environment" else read_file(file, {})
                lines += [f"export {name}={shlex.quote(one)}" for name, one in told.items()]
            elif key == "WorkingDirectory":
                lines.append(f"cd {value}")
            elif key == "ExecStart" and not value:  # a drop-in begins anew
                lines = [line for line in lines if line.startswith(("export ", "cd "))]
            elif key == "ExecStart":
                # ${X} is one word, whatever is in it.
                lines.append(re.sub(r"(?<!\S)(\$\{\w+\})(?!\S)", r'"\1"', value.lstrip("-@:+!")))
        lines.sort(key=lambda line: not line.startswith(("export ", "cd ")))
        self.script("\n".join(lines))

    def script(self, text: str) -> None:
        """Take over the llama-servers that a shell script starts."""
        known, exported = dict(os.environ), dict[str, str]()
        text = re.sub(r"<<-?\s*['\"]?(\w+).*?\n\s*\1\b", "", text, flags=re.DOTALL)
        text = without_comments(re.sub(r"`#[^`]*`", "", text.replace("\\\n", " ")))
        text = with_folders(text, self._commands.folder)
        chosen = chosen_in_cases(text)
        known |= {name: Untold(f"{name} depends on a `case`") for name in chosen}
        for statement in statements(text):
            assigned = _assignment(statement)
            if assigned and assigned[1] in chosen:
                continue
            try:
                self._statement(statement, known, exported)
            except (UntranslatableError, RuntimeError) as error:
                if assigned:
                    known[assigned[1]] = Untold(str(error))
                if SERVER.search(statement) or IMAGE.search(statement):
                    self._name = ""
                    self.note(f"a llama-server is left out: {error}")

    def _statement(self, text: str, known: dict[str, str], exported: dict[str, str]) -> None:
        text = calculated(text, known)
        if assigned := _assignment(text):
            name, more, value = assigned.groups()
            words = [expanded(word, known) for word in split(value.strip("()"))]
            is_list, old = value[:1] == "(", known.get(name, "") if more else ""
            known[name] = f"{old} {shlex.join(words)}".strip() if is_list else old + "".join(words)
            if text.startswith("export"):
                exported[name] = known[name]
            return
        words = words_of(text, known)
        while words and words[0] in _BEFORE:
            words.pop(0)
        if words[:1] in (["source"], ["."]) and len(words) > 1:
            known |= read_file(self._commands.folder / Path(words[1]).expanduser(), known)
        elif words[:1] == ["cd"] and len(words) > 1:
            self._commands.folder = self._commands.folder / Path(words[1]).expanduser()
        elif any(map(SERVER.fullmatch, words)) or runs_another(words):
            self.alone(words, dict(exported))
        else:  # tmux, screen, su: a word is the text of a shell
            for word in words:
                if " " in word and SERVER.search(word):
                    self.script(word)

    def alone(self, words: list[str], env: dict[str, str]) -> None:
        """Add a server that runs by itself: it is loaded at the start, and keeps its address."""
        server = self.add("", words, env, {"preload": True})
        if server is not None:
            self._listen_as(server)

    def _listen_as(self, server: ServerFlags) -> None:
        if where := published(server.ports, server):
            self.more.setdefault("listen", where)
        elif "listen" not in self.more:
            host = server.listens.get("--host") or "127.0.0.1"
            port = server.listens.get("--port") or "8080"
            if host.startswith("/"):
                self.more["listen"] = f"unix:{host}"
            elif "," not in host and port.isdecimal():
                self.more["listen"] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            else:
                self.note(f"its address {host}:{port} is left out: set `listen`")
        else:
            self.note("its own address is left out: all models answer where kvferry listens")


def _assignment(text: str) -> re.Match[str] | None:
    """Return the assignment that a statement is; None: it runs something, with variables or not."""
    found = _ASSIGNMENT.fullmatch(text)
    if found and (found[3].startswith(("(", "$(", "`")) or len(split(found[3])) < 2):
        return found
    return None


def _settings(text: str) -> list[tuple[str, str]]:
    """Return the keys and values of a unit of systemd, of all its sections."""
    text = re.sub(r"^[ \t]*[#;].*\n?", "", text, flags=re.MULTILINE)  # also inside of a value
    joined = re.sub(r"\\\n\s*", " ", text).replace("%h", str(Path.home()))
    return _OF_A_UNIT.findall(joined)


def _mount(told: str) -> Json:
    """Return a `Mount=` of podman as a volume of compose."""
    given = pairs(told.split(","))
    names = {"source": ("source", "src"), "target": ("destination", "dst", "target")}
    return {key: next((given[n] for n in ns if n in given), "") for key, ns in names.items()}


def _listed(value: Any) -> list[str]:
    return shlex.split(value) if isinstance(value, str) else [str(one) for one in value or ()]


def summary(made: Imported) -> Iterator[str]:
    """Yield what a person wants to know of an import."""
    told = "1 name answers" if len(made.names) == 1 else f"{len(made.names)} names answer"
    yield f"{told}: {', '.join(made.names)}"
    yield from (f"- {note}" for note in made.notes)
