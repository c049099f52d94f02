"""Turn the facts about one backend into findings with the exact flag to change. Pure.

Findings about several backends together are in `together.py`.
"""

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from router.base.types import MemoryKind
from router.llama.attach.learning import Attached
from router.llama.attach.monitor import EMPTIES_SLOTS, NO_RAM_CACHE, NO_SPS, PLACES_BY_AGE
from router.llama.attach.namespace import file_name
from router.llama.attach.probe_result import (
    NO_CACHE_REUSE,
    NO_SWA_FULL,
    OPAQUE_STATES,
    Padding,
    ProbeResult,
)
from router.store.files import openness
from router.store.format.head import VERSION
from router.tools.doctor.facts import Facts, Folder


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"  # works, but could be faster or safer
    ERROR = "error"  # something that the configuration asks for does not work

    def __call__(self, what: str, do: str = "") -> "Finding":
        """Return a finding of this level."""
        return Finding(self, what, do)


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact and its remedy, one line each. `do` is "" if there is nothing to do."""

    level: Level
    what: str
    do: str = ""


def of_backend(facts: Facts) -> list[Finding]:
    """Return all findings about one backend."""
    found = list(_folder(facts))
    if (wrong := facts.unusable) is not None:
        return [Level.ERROR(f"cannot be used: {wrong.reason}", wrong.do), *found]
    if facts.attached is None:
        return found
    return [
        *_server(facts, facts.attached),
        *found,
        *_moving(facts, facts.attached),
        *_idle_slots(facts.attached),
        *_words(facts),
    ]


def restores(facts: Facts) -> bool:
    """Return whether kvferry would restore on this backend, and the probe saw restored tokens."""
    if facts.attached is None:
        return False
    info, found = facts.attached.info, facts.attached.probe
    seen = bool(found.restored_extension) or found.padded is Padding.NEEDED
    return info.kv_dir is not None and info.memory_kind.can_restore and seen


def _server(facts: Facts, attached: Attached) -> Iterator[Finding]:
    props, models, info = attached.props, attached.models, attached.info
    build = props.build_info or "of an unknown build"
    yield Level.OK(f"reachable and ready; llama-server {build}")
    size = f"{_short(models.n_params)} parameters, {_short(models.size)}B"
    ftype = models.ftype.removeprefix("(guessed) ").removeprefix("all ")
    about = f"{size}, {ftype}" if ftype else size
    yield Level.OK(f"model {file_name(props.model_path)} ({about})")
    slots = f"{info.n_slots} slot{'s' * (info.n_slots != 1)} of {info.n_ctx:,} tokens"
    if info.n_ctx < models.n_ctx_train:
        yield Level.OK(f"{slots} (the model was trained on {models.n_ctx_train:,})")
    else:
        yield Level.OK(slots)
    if not props.endpoint_slots:
        yield Level.WARNING(
            "GET /slots is off: kvferry cannot see what its slots do or when one becomes idle",
            "restart it without --no-slots",
        )
    if props.is_sleeping:
        yield Level.WARNING(
            "the server was asleep; its slots lose their KV each time it falls asleep",
            "restart it without --sleep-idle-seconds",
        )
    if facts.speculative:
        yield Level.WARNING(
            "the server drafts tokens (speculative decoding): state files lack the draft's "
            "context, and requests after a restore may fail with HTTP 500",
            "if requests fail, restart it without -md (--model-draft)",
        )
    media = [name for name in ("vision", "audio") if getattr(props, f"has_{name}")]
    if media:
        yield Level.NOTE(
            f"the model accepts media ({', '.join(media)}); its KV is reused by servers with the"
            " same projector",
            "give every server of this model the same --mmproj",
        )


def _short(number: float) -> str:
    """Format a number with three digits and a unit prefix, such as `135 M`."""
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} T"


def _folder(facts: Facts) -> Iterator[Finding]:
    path, folder = facts.backend.kv_dir, facts.folder
    if folder is None:
        return
    shown = shlex.quote(str(path))
    if not folder.is_folder:
        yield Level.ERROR(
            f"kv_dir {path} is not a directory on this machine",
            f"mkdir -m 700 {shown}, and start llama-server with --slot-save-path {shown}",
        )
    elif not folder.usable:
        yield Level.ERROR(
            f"kv_dir {path} cannot be used by kvferry (uid {os.geteuid()}); it is {_owned(folder)}",
            "run kvferry and llama-server as the same user",
        )
    elif found := openness(folder.mode, group_access=folder.group_access):
        open_to, right = found
        yield Level.ERROR(
            f"kv_dir {path} is open to {open_to} (mode {folder.mode:o}), and state files contain"
            " conversations: `kvferry serve` does not start with it",
            f"chmod {right} {shown}",
        )


def _owned(folder: Folder) -> str:
    return f"owned by uid {folder.uid} with mode {folder.mode:o}"


def _moving(facts: Facts, attached: Attached) -> Iterator[Finding]:
    """Yield whether saving and restoring works, or the first reason why not.

    (0) nothing to save; (1) no --slot-save-path; (2) no kv_dir; (3) no file in it; (4) not tried;
    (5) save refused; (6) unusable file; (7) the result of a restore.
    """
    found, kv_dir = attached.probe, facts.backend.kv_dir
    folder = shlex.quote(str(kv_dir)) if kv_dir is not None else "DIR"
    if not found.generates:  # (0)
        yield Level.NOTE(f"{found.note}")
    elif not facts.actions:  # (1)
        also = "" if kv_dir is not None else ", and set `kv_dir` (--kv-dir) to the same directory"
        yield Level.ERROR(
            "no KV can be saved or restored: llama-server was started without --slot-save-path",
            f"restart it with --slot-save-path {folder}{also}; no environment variable sets it",
        )
    elif facts.folder is None:  # (2)
        yield Level.ERROR(
            "no KV can be saved or restored: the configuration has no kv_dir for this backend",
            "set `kv_dir` (--kv-dir DIR) to its --slot-save-path as seen from this machine",
        )
    elif not facts.folder.usable:
        return  # `_folder` reports it
    elif facts.unseen:  # (3)
        yield Level.ERROR(
            f"the server saved a slot, but no file appeared in kv_dir {kv_dir}: its "
            f"--slot-save-path is another directory, where {facts.unseen} was left",
            f"restart it with --slot-save-path {folder}, or correct kv_dir (--kv-dir)",
        )
    elif facts.untried:  # (4)
        yield Level.WARNING(
            f"saving and restoring were not tried: {facts.untried}",
            "try again when a slot is free, or after a restart of llama-server",
        )
    elif not found.can_save:  # (5)
        yield Level.ERROR(f"saving does not work: {found.problem}", "read llama-server's log")
    elif found.layout is None:  # (6)
        yield _unusable(facts)
    else:
        yield from _moved(attached)  # (7)
        yield _files(found)
        yield from _older(found)
        yield _speeds(found)


def _unusable(facts: Facts) -> Finding:
    assert facts.attached is not None
    us, saved = os.geteuid(), facts.saved
    if saved is not None and saved.uid != us:
        return Level.ERROR(
            f"the server saved a slot, but the file belongs to uid {saved.uid} "
            f"(mode {saved.mode:o}), and kvferry runs as uid {us}",
            "run kvferry and llama-server as the same user",
        )
    problem = facts.attached.probe.problem
    return Level.ERROR(f"{problem}", "check free space and the file system of kv_dir")


def _moved(attached: Attached) -> Iterator[Finding]:
    """Yield the problem of a restore (1), or what works for this memory kind (2)."""
    found, info = attached.probe, attached.info
    n, longer, other = found.n_tokens, found.restored_extension, found.restored_divergence
    seen = ""
    if longer is not None:
        half = f"{other}/{(n + 1) // 2} if it diverges"
        seen = f"tokens reused after a restore: {longer}/{n} if the prompt continues, {half}"
    kind = info.memory_kind
    if found.problem:  # (1)
        what, do = found.problem, "read llama-server's log; try a newer build"
        for flag in (NO_SWA_FULL, NO_CACHE_REUSE):
            if what.endswith(flag):
                what, do = what.removesuffix(f"; {flag}"), flag
        what = f"{what} ({seen})" if seen else what
        yield Level.ERROR(what, do)
    elif kind is MemoryKind.SLIDING_WINDOW:  # (2)
        yield _windowed(found, seen)
    elif kind in (MemoryKind.HYBRID, MemoryKind.RECURRENT, MemoryKind.OPAQUE):
        yield Level.NOTE(
            f"{kind} model ({seen}): a saved state can be reused by prompts that continue it, not "
            "by prompts that diverge inside it"
        )
    else:
        cut = "; prefixes can be cut out of state files" if found.cuts else ""
        yield Level.OK(f"saving and restoring work, full attention; {seen}{cut}")
        if not found.cuts:
            why = found.note or "cutting a prefix out of a state file was not tried"
            yield Level.NOTE(f"{why}; only whole state files are used")


def _windowed(found: ProbeResult, seen: str) -> Finding:
    if found.padded is Padding.NEEDED:
        return Level.NOTE(f"sliding-window attention; {found.note}")
    return Level.OK(
        f"saving and restoring work, sliding-window attention of {found.window:,} tokens; {seen}; "
        "state files are padded for it"
    )


def _older(found: ProbeResult) -> Iterator[Finding]:
    """Yield what a newer build would add to state files of an older version."""
    if 0 < found.state_version < VERSION:
        yield Level.NOTE(
            f"its state files are of version {found.state_version}, the newest is {VERSION}: older"
            " builds save no checkpoints, and the oldest no prompts with media",
            "a newer llama-server lets conversations of sliding-window, hybrid and recurrent models"
            " go back after a restore; states saved by the old build are not used by the new one",
        )


def _files(found: ProbeResult) -> Finding:
    """Describe the layout of its state files, which is equal on servers that exchange them."""
    assert found.layout is not None
    if found.layout.is_opaque:
        return Level.NOTE(f"{OPAQUE_STATES}: {found.unread}")
    k, v = found.cache_types
    size = f"{found.layout.bytes_per_token:,.0f} bytes a token"
    if not found.n_stream:
        return Level.OK(f"state files: no attention, one fixed size, and {size}")
    streams = f"{found.n_stream} stream{'s' * (found.n_stream != 1)}"
    return Level.OK(f"state files: K {k}, V {v}, {streams}, {size}")


def _speeds(found: ProbeResult) -> Finding:
    parts = []
    if found.prefill_s:
        parts.append(f"prefill {found.n_tokens / found.prefill_s:,.0f} tokens/s")
    if found.size_bytes is not None:
        size = f"{found.n_tokens} tokens ({found.size_bytes / 1e6:,.1f} MB)"
        for name, seconds in (("save", found.save_s), ("restore", found.restore_s)):
            if seconds is not None:
                parts.append(f"{name} {seconds * 1000:,.1f} ms")
        parts[-1] += f" for {size}"
    return Level.OK(", ".join(parts))


def _idle_slots(attached: Attached) -> Iterator[Finding]:
    """Yield problems of idle slots and the RAM cache (llama-server.md sections 0.1 and 0.6)."""
    info, layout = attached.info, attached.probe.layout
    if attached.probe.by_prefix is False:
        yield Level.WARNING(PLACES_BY_AGE, NO_SPS)
    if attached.probe.ram_cache:
        yield Level.WARNING(
            "the server's RAM cache can give one tenant's prompts to another, and kvferry cannot"
            " prevent that",
            "restart it with --cache-ram 0, or set auth.share_cache: all",
        )
    if not info.keeps_idle_slots:
        yield Level.WARNING(EMPTIES_SLOTS, NO_RAM_CACHE)
    elif layout is not None and layout.n_stream == 1 and info.n_slots > 1:
        yield Level.NOTE(
            f"its slots share {info.n_ctx:,} tokens of KV: a long slot can displace others",
            # Not unified, -c is divided among the slots (llama-server.md section 3).
            f"--no-kv-unified -np {info.n_slots} -c {info.n_slots * info.n_ctx} gives each slot as"
            " many tokens of its own, if there is enough memory",
        )


def _words(facts: Facts) -> Iterator[Finding]:
    words = facts.words
    if words is None:
        return
    if words.why_whole is None:
        what = f"prompts are tokenized in segments, cut at {words.n_specials} special tokens"
        yield Level.OK(what)
    else:
        what = f"each new prompt is tokenized whole, which is exact but slower: {words.why_whole}"
        yield Level.NOTE(what)
    if words.local is False:
        why = words.local_problem or "its tokens differ from the server's"
        yield Level.WARNING(
            f"the local tokenizer is not used: {why}",
            "set tokenizer.path to the .gguf that the server runs, or tokenizer.mode: backend",
        )
    elif words.local:
        yield Level.OK("the local tokenizer agrees with the server")
