"""`kvferry import llama-server FILE`: presets of llama-server's router mode as servers of kvferry.

The file is that of `--models-preset` (llama-server.md section 5.8): a section for each model, whose
keys are flags without their dashes, and a section `[*]` for all.
"""

import configparser
import shlex

from router.tools.serving.llama_swap import ImportProblemError, configuration_of

_ALL = "*"
_ENV = "LLAMA_"  # a key may also be the name of a variable
# From `llama-server --help` of b11434: its flags with one dash.
_ONE_DASH = frozenset(
    (
        *("C", "Cb", "Cbd", "Cd", "Cr", "Crb", "Crd", "a", "ag", "b", "bs", "c", "cb", "cl"),
        *("cmoe", "cmoed", "cms", "cram", "ctk", "ctkd", "ctv", "ctvd", "ctxcp", "dev"),
        *("devd", "dr", "dt", "e", "fa", "fit", "fitc", "fitt", "hf", "hfd", "hff", "hfrd"),
        *("hft", "hfr", "j", "jf", "kvo", "kvu", "l", "lcd", "lcs", "lm", "lv", "lzm", "m"),
        *("md", "mg", "mm", "mmdev", "mmu", "mu", "n", "ncffn", "ncmoe", "ncmoed", "ngl"),
        *("ngld", "np", "nr", "ot", "otd", "r", "rea", "s", "sm", "sp", "sps", "t", "tb"),
        *("tbd", "td", "to", "ts", "ub", "v"),
    )
)
# Flags without a value, so far as they may be given as on, off, 0 or 1.
_SWITCHES = frozenset(
    (
        *("cache-idle-slots", "cache-prompt", "cb", "check-tensors", "cmoe", "cont-batching"),
        *("context-shift", "cpu-moe", "embedding", "embeddings", "escape", "ignore-eos"),
        *("jinja", "kv-offload", "kv-unified", "kvo", "kvu", "log-prefix", "log-timestamps"),
        *("metrics", "mlock", "mmap", "mmproj-auto", "mmproj-offload", "offline"),
        *("op-offload", "perf", "prefill-assistant", "props", "repack", "rerank"),
        *("reranking", "slots", "swa-full", "ui", "verbose", "warmup"),
    )
)
_TRUE, _FALSE = (
    frozenset({"true", "on", "enabled", "1"}),
    frozenset({"false", "off", "disabled", "0"}),
)
_LONG = {"cb": "cont-batching", "kvo": "kv-offload", "kvu": "kv-unified"}
_OURS = frozenset({"load-on-startup", "stop-timeout", "version"})  # no flags


def imported(text: str) -> str:
    """Return the text of a kvferry configuration. Raises ImportProblemError."""
    parser = configparser.ConfigParser(
        default_section=_ALL,
        interpolation=None,
        inline_comment_prefixes=(";", "#"),
        strict=False,
        empty_lines_in_values=False,
    )
    setattr(parser, "optionxform", str)  # noqa: B010 - keys keep their case
    try:
        parser.read_string(f"[{_ALL}]\n{text}")
    except configparser.Error as error:
        problem = str(error).splitlines()[0].replace("<string>", "the file")
        raise ImportProblemError(f"it is no file of presets: {problem}") from error
    if not parser.sections():
        raise ImportProblemError("it has no section: a preset begins with [NAME]")
    models: dict[str, object] = {}
    preload = []
    for name in parser.sections():
        keys = dict(parser[name])
        words = ["llama-server"]
        if not {"m", "model", "hf", "hfr", "hf-repo"} & keys.keys() and "/" in name:
            words += ["-hf", name]  # as llama-server reads it
        for key, value in keys.items():
            if key not in _OURS and not key.startswith(_ENV):
                words += _words(key, value)
        env = [f"{key}={value}" for key, value in keys.items() if key.startswith(_ENV)]
        models[name] = {"cmd": shlex.join(words), "env": env}
        if keys.get("load-on-startup", "").lower() in _TRUE:
            preload.append(name)
    document = {"models": models, "hooks": {"on_startup": {"preload": preload}}}
    return configuration_of(document, "presets of llama-server's router mode", "llama-server")


def _words(key: str, value: str) -> list[str]:
    """Return a preset's key and value as flags."""
    bare = key.removeprefix("no-")
    word = value.lower()
    # No flag with a value takes true or false; some take on and off, or a number.
    if word not in ("true", "false") and not (bare in _SWITCHES and word in _TRUE | _FALSE):
        return [_dashed(key), value]
    wanted = (word in _TRUE) is (key == bare)
    return [_dashed(bare)] if wanted else [f"--no-{_LONG.get(bare, bare)}"]


def _dashed(key: str) -> str:
    return f"-{key}" if key in _ONE_DASH else f"--{key}"
