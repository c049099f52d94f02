"""`kvferry import llama-server FILE`: presets of llama-server's router mode as servers of kvferry.

The file is that of `--models-preset` (llama-server.md section 5.8): a section for each model, whose
keys are flags without their dashes, and a section `[*]` for all.
"""

import configparser
import shlex

from router.tools.serving.llama_swap import ImportProblemError, configuration_of

_ALL = "*"
_FLAGS_WITH_ONE_DASH = frozenset({"cram", "cmoe", "ncmoe", "ctxcp"})  # beside those of 1 to 3
_TRUE, _FALSE = frozenset({"true", "on", "enabled"}), frozenset({"false", "off", "disabled"})
_BOTH = frozenset({"fa", "flash-attn"})  # these take the word itself
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
            if key not in _OURS and not key.isupper():
                words += _words(key, value)
        env = [f"{key}={value}" for key, value in keys.items() if key.isupper()]
        models[name] = {"cmd": shlex.join(words), "env": env}
        if keys.get("load-on-startup", "").lower() in _TRUE:
            preload.append(name)
    document = {"models": models, "hooks": {"on_startup": {"preload": preload}}}
    return configuration_of(document, "presets of llama-server's router mode", "llama-server")


def _words(key: str, value: str) -> list[str]:
    """Return a preset's key and value as flags."""
    short = len(key) <= 3 or key in _FLAGS_WITH_ONE_DASH
    flag = f"-{key}" if short else f"--{key}"
    word = value.lower()
    if key in _BOTH or word not in _TRUE | _FALSE:
        return [flag, value]
    if word in _TRUE:
        return [flag]
    return [f"-no-{key}" if short else f"--no-{key}"]
