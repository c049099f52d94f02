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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from router.base.api_keys import hash_text
from router.config.filters import KEPT
from router.config.llama_flags import USUAL
from router.config.loader import ConfigError
from router.config.schema import parse
from router.config.servers import ModelConfig
from router.servers.launch import SECRET
from router.tools.serving.commands import (
    IMAGE,
    SERVER,
    Commands,
    Json,
    ServerFlags,
    UntranslatableError,
    runs_another,
    split,
    statements,
    without_comments,
)
from router.tools.serving.containers import folders, mounted, published, short_port
from router.tools.serving.variables import VARIABLE, calculated, expanded, filled, pairs, read_file

_ASSIGNMENT = re.compile(
    r"(?:(?:then|else|do|export|local|readonly|declare)\s+(?:-\w+\s+)*)*"
    r"'?([A-Za-z_]\w*)(\+?)=(\(.*\)|.*)",
    re.DOTALL,
)
_OF_A_UNIT = re.compile(r"^[ \t]*(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
# Of a service's file of variables: what its server reads. Others may be secrets.
_OF_A_SERVER = re.compile(r"LLAMA_|GGML_|CUDA_|HIP_|ROCR_|HSA_|VK_|OMP_|HF_(?!TOKEN)|NVIDIA_")
# Keys of a llama-swap model that change nothing here, or are read below.
_READ = {
    *("cmd", "cmdStop", "proxy", "name", "description", "checkEndpoint", "useModelName", "macros"),
    *("aliases", "env", "ttl", "filters", "metadata", "capabilities", "timeouts"),
    *("unlisted", "concurrencyLimit"),
}


class ImportProblemError(ValueError):
    """The file is none of these, or has no model that can be taken over."""


class _Loader(yaml.SafeLoader):
    """YAML as Go reads it: `on` and `yes` are texts."""


_Loader.yaml_implicit_resolvers = {
    first: [one for one in found if one[0] != "tag:yaml.org,2002:bool" or first in "tTfF"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(slots=True)
class Imported:
    """What was made of a file: the text of a configuration, and notes by model."""

    text: str
    names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def imported(path: Path) -> Imported:
    """Return the configuration for a file, or for a directory of .gguf files. Blocking.

    Raises ImportProblemError, and OSError or UnicodeDecodeError if it cannot be read.
    """
    made = _Import(path.resolve())
    if path.is_dir():
        made.files(path.resolve(), [])
        return made.result()
    text = path.read_text("utf-8-sig")
    document: Any = None
    if not re.search(r"^\s*\[[^\]]+\]\s*$|^#!", text, re.MULTILINE):
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
        elif re.search(r"^\[[^\]]+\]\s*$", text, re.MULTILINE) and "\nif [" not in text:
            made.presets(text, [])
        else:
            made.script(text)
    except ImportProblemError:
        raise
    except (ValueError, AttributeError, TypeError, RecursionError, KeyError) as error:
        raise ImportProblemError(f"it cannot be read: {error}") from error
    return made.result()


class _Import:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = ""  # of the model that notes are about
        self._commands = Commands(path if path.is_dir() else path.parent, self.note)
        self.models: dict[str, Json] = {}
        self.servers: Json = {}
        self.more: Json = {}
        self.notes: list[str] = []
        self._misses_keys = False  # those of a server that let in nobody without

    def note(self, told: str) -> None:
        """Note what is changed or left out, and why."""
        self.notes.append(f"{self._name}: {told}" if self._name else told)

    def result(self) -> Imported:
        """Return the configuration. Raises ImportProblemError without a model."""
        if not self.models:
            told = "; ".join(self.notes) or "it starts no llama-server"
            raise ImportProblemError(f"nothing can be taken over: {told}")
        self._fit()
        if self._misses_keys and "auth" not in self.more:
            self._name, listen = "", self.more.get("listen", "127.0.0.1:8080")
            if not listen.startswith("unix:"):
                self.more["listen"] = f"127.0.0.1:{listen.rpartition(':')[2]}"
                self.note("it listens for this machine alone, until `auth` has keys")
        names = [n for one in self.models.values() for n in (one["name"], *one.get("aliases", ()))]
        names += [one["name"] for one in self.more.get("filters", ()) if "model" in one]
        models = [*self.models.values()]
        document = self.more | {"servers": self.servers | {"models": models}}
        made = Imported("", list(dict.fromkeys(names)), self.notes)
        body = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
        head = [f"# Made from {self._path.name} by `kvferry import`."]
        head += [f"# - {line}" for note in made.notes for line in note.splitlines()]
        made.text = "\n".join(head) + "\n" + body
        try:
            parse(made.text, "what was made of it")
        except ConfigError as error:
            raise ImportProblemError(str(error)) from error
        return made

    def _fit(self) -> None:
        """Take out what two models cannot both have, and more preloads than are loaded."""
        own = {one["name"] for one in self.models.values()}
        preloads: dict[str | None, int] = {}
        groups = self.servers.get("groups", ())
        limits: dict[str | None, int] = {one["name"]: one["loaded"] for one in groups}
        for name, one in self.models.items():
            self._name = name
            for alias in [a for a in one.get("aliases", ()) if a in own and a != one["name"]]:
                one["aliases"].remove(alias)
                self.note(f"the alias {alias} is left out: it is the name of another model")
            group: str | None = one.get("group")
            most = limits.get(group, int(self.servers.get("loaded", len(self.models))))
            preloads[group] = preloads.get(group, 0) + bool(one.get("preload") or one.get("keep"))
            if preloads[group] > most and one.pop("preload", None):
                self.note(f"it is not loaded at the start: at most {most} are loaded at a time")

    def add(
        self, name: str, words: list[str], env: dict[str, str], more: Json
    ) -> ServerFlags | None:
        """Add a model; None: it cannot be taken over, and a note says why."""
        self._name = name
        try:
            keys, server = self._commands.translated(words, env)
            if server.router:
                self.router(server)
                return server
        except (UntranslatableError, ValueError, RuntimeError) as error:
            self.note(f"is left out: {error}")
            return None
        file = Path(server.source[1]).name if server.source else self._path.name
        name = name or next(iter(server.names), file.partition(".gguf")[0])
        self._name = name
        label = _label(name)[:60].strip("-") or "model"
        taken = {one["name"] for one in self.models.values()}
        label = next(one for one in (label, *(f"{label}-{n}" for n in range(2, 999)))
                     if one not in taken)  # fmt: skip
        aliases = [name, *more.pop("aliases", ()), *server.names]
        aliases = [one for one in dict.fromkeys(aliases) if one and one != label]
        shared = "" if "kv_unified" not in keys else " that all slots share, as before"
        if sizes := {key: keys[key] for key in ("slots", "ctx") if key in keys}:
            self.note(f"{sizes['slots']} slots, {sizes['ctx'] or 'the trained number of'} tokens"
                      + (shared or " each"))  # fmt: skip
        own = {"name": label} | ({"aliases": aliases} if aliases else {}) | keys
        client_keys = self._commands.keys(server, env)
        if server.idle_s:
            more.setdefault("ttl", f"{server.idle_s}s")
            self.note(f"idle for {server.idle_s} s, it is stopped instead of put to sleep")
        for variable in [one for one in env if SECRET.search(one.upper())]:
            del env[variable]
            self.note(f"{variable} is left out, which looks like a secret: name it in `env`")
        entry = own | ({"env": env} if env else {}) | more
        try:
            ModelConfig.model_validate(entry)
        except ValidationError as error:
            self.note(f"is left out: {error.errors()[0]['msg'].removeprefix('Value error, ')}")
            return None
        if client_keys is None:
            self._misses_keys = True
            self.note("its --api-key-file cannot be read here: put its keys into `auth`")
        for key in client_keys or ():
            self._key(key)
        if files := self._commands.tls(server):
            self.more.setdefault("tls", files)
        self.models[name] = entry
        return server

    def _key(self, key: str) -> None:
        """Let clients in by the keys that they have."""
        keys = self.more.setdefault("auth", {"keys": []})["keys"]
        told = hash_text(key)
        if told not in [one["hash"] for one in keys]:
            keys.append({"name": f"key-{len(keys) + 1}", "tenant": "all", "hash": told})

    def llama_swap(self, document: Json) -> None:
        """Take over a configuration of llama-swap."""
        macros = document.get("macros") or {}
        ttl = document.get("globalTTL") or 0
        within = document.get("healthCheckTimeout")
        more: Json = {"start_timeout": f"{max(int(within), 15)}s"} if within else {}
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
            self._key(filled(str(key), macros))

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
        rest, found = dict(self.models), []
        for name, group in groups.items():
            members = [rest.pop(one) for one in group.get("members") or () if one in rest]
            label = _label(str(name))
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
            found.append({"name": "others", "loaded": 1})
            for model in rest.values():
                model["group"] = "others"
        self.servers["groups"] = found

    def router(self, server: ServerFlags) -> None:
        """Take over the models of llama-server's router mode, whose other flags all of them get."""
        base = list(server.args)
        base += ["-c", str(server.n_ctx)] if server.n_ctx else []
        base += ["-np", str(server.n_slots)] if server.n_slots else []
        folder = self._commands.folder
        self._loaded(server)
        if named := server.router.get("--models-preset"):
            self.presets((folder / named).read_text("utf-8-sig"), base)
        if named := server.router.get("--models-dir"):
            self.files(folder / named, base)

    def _loaded(self, server: ServerFlags) -> None:
        """Take over how many models a router loads at a time."""
        self.servers.pop("loaded", None)
        if (most := server.router.get("--models-max", "4")) != "0":
            self.servers["loaded"] = int(most)

    def files(self, folder: Path, base: list[str]) -> None:
        """Take over a directory of models, as `--models-dir` does."""
        for path in sorted(folder.iterdir()):
            found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
            projectors = [one for one in found if "mmproj" in one.name]
            models = [one for one in found if one.suffix == ".gguf" and one not in projectors]
            models = [one for one in models if not re.search(r"-0000[2-9]-of-|-000[1-9]", one.name)]
            if models and (path.is_dir() or not projectors):
                more = ["--mmproj", str(projectors[0])] if projectors else []
                words = ["llama-server", "-m", str(models[0]), *base, *more]
                self.add(path.name.removesuffix(".gguf"), words, {}, {})

    def presets(self, text: str, base: list[str]) -> None:
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
            self.add(name, words, {}, more)

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
            "volumes": found.get("Volume", ()),
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
                lines.append(value.lstrip("-@:+!"))
        lines.sort(key=lambda line: not line.startswith(("export ", "cd ")))
        self.script("\n".join(lines))

    def script(self, text: str) -> None:
        """Take over the llama-servers that a shell script starts."""
        known, exported = dict(os.environ), dict[str, str]()
        text = re.sub(r"<<-?\s*['\"]?(\w+).*?\n\s*\1\b", "", text, flags=re.DOTALL)
        text = without_comments(re.sub(r"`#[^`]*`", "", text.replace("\\\n", " ")))
        for statement in statements(text):
            try:
                self._statement(statement, known, exported)
            except (UntranslatableError, RuntimeError) as error:
                if SERVER.search(statement):
                    self._name = ""
                    self.note(f"a llama-server is left out: {error}")

    def _statement(self, text: str, known: dict[str, str], exported: dict[str, str]) -> None:
        text = calculated(text, known)
        assigned = _ASSIGNMENT.fullmatch(text)
        if assigned and (assigned[3][:1] == "(" or len(split(assigned[3])) < 2):
            name, more, value = assigned.groups()
            words = [expanded(word, known) for word in split(value.strip("()"))]
            is_list, old = value[:1] == "(", known.get(name, "") if more else ""
            known[name] = f"{old} {shlex.join(words)}".strip() if is_list else old + "".join(words)
            if text.startswith("export"):
                exported[name] = known[name]
            return
        words = []
        for word in split(text):
            value = expanded(os.path.expanduser(word), known)
            words += split(value) if VARIABLE.fullmatch(word) else [value]
        while words and words[0] in ("exec", "nohup", "time", "sudo", "do", "then", "else", "{"):
            words.pop(0)
        if words[:1] == ["cd"] and len(words) > 1:
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


def _settings(text: str) -> list[tuple[str, str]]:
    """Return the keys and values of a unit of systemd, of all its sections."""
    joined = re.sub(r"\\\n\s*", " ", text).replace("%h", str(Path.home()))
    return _OF_A_UNIT.findall(joined)


def _label(name: str) -> str:
    """Return a name of what kvferry allows in one, as near as possible."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def _listed(value: Any) -> list[str]:
    return shlex.split(value) if isinstance(value, str) else [str(one) for one in value or ()]


def summary(made: Imported) -> Iterator[str]:
    """Yield what a person wants to know of an import."""
    told = "1 name answers" if len(made.names) == 1 else f"{len(made.names)} names answer"
    yield f"{told}: {', '.join(made.names)}"
    yield from (f"- {note}" for note in made.notes)
