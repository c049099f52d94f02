"""What the facts mean for the operator: findings with the exact flag to change. Pure.

One backend at a time; what is between them is in `doctor_fleet.py`.
"""

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from router.base.types import MemoryKind
from router.core.model.memory_kinds import can_restore
from router.llama.attach.monitor import Attached
from router.llama.attach.probe import NO_CACHE_REUSE, NO_SWA_FULL, Padding, Probe
from router.store.files import openness
from router.tools.doctor.facts import Facts, Folder


class Level(StrEnum):
    """How much it matters."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"  # works, and could work better or more safely
    ERROR = "error"  # something that was asked for does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of what, one of what to do."""

    level: Level
    what: str
    do: str = ""


def of_backend(facts: Facts) -> list[Finding]:
    """Everything there is to say about one backend."""
    found = list(_folder(facts))
    if (wrong := facts.unusable) is not None:
        return [Finding(Level.ERROR, f"cannot be used: {wrong.reason}", wrong.do), *found]
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
    """kvferry would restore states on this backend, and it was seen to help."""
    if facts.attached is None:
        return False
    info, found = facts.attached.info, facts.attached.probe
    seen = bool(found.restored_extension) or found.padded is Padding.NEEDED
    return info.place is not None and can_restore(info.memory_kind) and seen


def _server(facts: Facts, attached: Attached) -> Iterator[Finding]:
    props, models, info = attached.props, attached.models, attached.info
    build = props.build_info or "of an unknown build"
    yield Finding(Level.OK, f"reachable and ready; llama-server {build}")
    size = f"{_short(models.n_params)} parameters, {_short(models.size)}B"
    ftype = models.ftype.removeprefix("(guessed) ").removeprefix("all ")
    about = f"{size}, {ftype}" if ftype else size
    yield Finding(Level.OK, f"model {file_name(props.model_path)} ({about})")
    slots = f"{info.n_slots} slot{'s' * (info.n_slots != 1)} of {info.n_ctx:,} tokens"
    if info.n_ctx < models.n_ctx_train:
        yield Finding(Level.OK, f"{slots} (the model was trained on {models.n_ctx_train:,})")
    else:
        yield Finding(Level.OK, slots)
    if not props.endpoint_slots:
        yield Finding(
            Level.WARNING,
            "it does not tell what its slots do: kvferry cannot see when one is free again",
            "restart it without --no-slots",
        )
    if props.is_sleeping:
        yield Finding(
            Level.WARNING,
            "it was asleep; whenever it falls asleep its slots lose what they hold",
            "restart it without --sleep-idle-seconds",
        )
    if facts.speculative:
        yield Finding(
            Level.WARNING,
            "it drafts tokens (speculative decoding): the draft's context is not in state files, "
            "and requests after a restore may fail with HTTP 500",
            "if they do, restart it without -md (--model-draft)",
        )
    media = [name for name in ("vision", "audio") if getattr(props, f"has_{name}")]
    if media:
        yield Finding(
            Level.NOTE,
            f"it takes media ({', '.join(media)}); their KV is reused like that of text",
            "give every server of this model the same --mmproj",
        )


def _short(number: float) -> str:
    """`134.5 M`."""
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
        yield Finding(
            Level.ERROR,
            f"kv_dir {path} is not a directory on this machine",
            f"mkdir -m 700 {shown}, and start llama-server with --slot-save-path {shown}",
        )
    elif not folder.usable:
        yield Finding(
            Level.ERROR,
            f"kv_dir {path} cannot be used by uid {os.geteuid()}; it is {_owned(folder)}",
            "run kvferry and llama-server as the same user",
        )
    elif found := openness(folder.mode, group_access=folder.group_access):
        whom, right = found
        yield Finding(
            Level.ERROR,
            f"kv_dir {path} is open to {whom} (mode {folder.mode:o}), and state files are"
            " transcripts: kvferry does not start with it",
            f"chmod {right} {shown}",
        )


def _owned(folder: Folder) -> str:
    return f"owned by uid {folder.uid} with mode {folder.mode:o}"


def _moving(facts: Facts, attached: Attached) -> Iterator[Finding]:
    """Does saving and restoring work? The first reason why not is the one that is told.

    (0) there is nothing to save; (1) no --slot-save-path; (2) no kv_dir; (3) no file there; (4) not
    tried; (5) save refused; (6) a file that cannot be used; (7) restoring gives nothing; else it
    works.
    """
    found, kv_dir = attached.probe, facts.backend.kv_dir
    folder = shlex.quote(str(kv_dir)) if kv_dir is not None else "DIR"
    if not found.generates:  # (0)
        yield Finding(Level.NOTE, f"{found.note}")
    elif not facts.actions:  # (1)
        also = "" if kv_dir is not None else ", and give kvferry the same as `kv_dir` (--kv-dir)"
        yield Finding(
            Level.ERROR,
            "no KV can be saved or restored: llama-server was started without --slot-save-path",
            f"restart it with --slot-save-path {folder}{also}",
        )
    elif facts.folder is None:  # (2)
        yield Finding(
            Level.ERROR,
            "no KV can be saved or restored: the configuration has no kv_dir for it",
            "give its --slot-save-path, as seen from this machine, as `kv_dir` (--kv-dir DIR)",
        )
    elif not facts.folder.usable:
        return  # told already
    elif facts.unseen:  # (3)
        yield Finding(
            Level.ERROR,
            f"it saved a slot, but no file appeared in kv_dir {kv_dir}: that is not its "
            f"--slot-save-path, where {facts.unseen} was left",
            f"restart it with --slot-save-path {folder}, or correct kv_dir (--kv-dir)",
        )
    elif facts.untried:  # (4)
        yield Finding(
            Level.WARNING,
            f"saving and restoring was not tried: {facts.untried}",
            "try again when a slot is free, or after a restart of llama-server",
        )
    elif not found.can_save:  # (5)
        yield Finding(
            Level.ERROR, f"saving does not work: {found.problem}", "read llama-server's log"
        )
    elif found.layout is None:  # (6)
        yield _unusable(facts)
    else:
        yield from _moved(attached)  # (7)
        yield _files(found)
        yield _speeds(found)


def _unusable(facts: Facts) -> Finding:
    assert facts.attached is not None
    us, saved = os.geteuid(), facts.saved
    if saved is not None and saved.uid != us:
        return Finding(
            Level.ERROR,
            f"it saved a slot, but the file belongs to uid {saved.uid} (mode {saved.mode:o}) and "
            f"kvferry runs as uid {us}",
            "run kvferry and llama-server as the same user",
        )
    problem = facts.attached.probe.problem
    return Finding(Level.ERROR, f"{problem}", "check free space and the file system of kv_dir")


def _moved(attached: Attached) -> Iterator[Finding]:
    """(1) something was wrong; (2) what works, by kind."""
    found, info = attached.probe, attached.info
    n, longer, other = found.n_tokens, found.restored_extension, found.restored_divergence
    seen = ""
    if longer is not None:
        half = f"{other}/{(n + 1) // 2} when branched off"
        seen = f"restored: {longer}/{n} cached when continued, {half}"
    kind = info.memory_kind
    if found.problem:  # (1)
        what, do = found.problem, "read llama-server's log; try a newer build"
        for flag in (NO_SWA_FULL, NO_CACHE_REUSE):
            if what.endswith(flag):
                what, do = what.removesuffix(f"; {flag}"), flag
        what = f"{what} ({seen})" if seen else what
        yield Finding(Level.ERROR, what, do)
    elif kind is MemoryKind.SLIDING_WINDOW:  # (2)
        yield _windowed(found, seen)
    elif kind in (MemoryKind.HYBRID, MemoryKind.RECURRENT):
        yield Finding(
            Level.NOTE,
            f"{kind} model ({seen}): a saved state helps prompts that continue it, not those that "
            "branch off inside it",
        )
    else:
        cut = "; a prefix of a saved state can be cut out" if found.cuts else ""
        yield Finding(Level.OK, f"saving and restoring works, full attention; {seen}{cut}")
        if not found.cuts:
            why = found.note or "cutting a prefix out of a state was not tried"
            yield Finding(Level.NOTE, f"{why}; whole states are used")


def _windowed(found: Probe, seen: str) -> Finding:
    if found.padded is Padding.NEEDED:
        return Finding(Level.NOTE, f"sliding-window attention; {found.note}")
    return Finding(
        Level.OK,
        f"saving and restoring works, sliding-window attention of {found.window:,} tokens; {seen}; "
        "files are padded for it",
    )


def _files(found: Probe) -> Finding:
    """What its state files are made of; equal on all servers that exchange them."""
    assert found.layout is not None
    k, v = found.cache_types
    size = f"{found.layout.bytes_per_token:,.0f} bytes a token"
    if not found.n_stream:
        return Finding(Level.OK, f"state files: no attention, one size for all, and {size}")
    streams = f"{found.n_stream} stream{'s' * (found.n_stream != 1)}"
    return Finding(Level.OK, f"state files: K {k}, V {v}, {streams}, {size}")


def _speeds(found: Probe) -> Finding:
    parts = []
    if found.prefill_s:
        parts.append(f"prefill {found.n_tokens / found.prefill_s:,.0f} tokens/s")
    if found.size_bytes is not None:
        size = f"{found.n_tokens} tokens ({found.size_bytes / 1e6:,.1f} MB)"
        for name, seconds in (("save", found.save_s), ("restore", found.restore_s)):
            if seconds is not None:
                parts.append(f"{name} {seconds * 1000:,.1f} ms")
        parts[-1] += f" for {size}"
    return Finding(Level.OK, ", ".join(parts))


def _idle_slots(attached: Attached) -> Iterator[Finding]:
    """llama-server.md sections 0.1 and 0.6."""
    info, layout = attached.info, attached.probe.layout
    if attached.probe.ram_cache:
        yield Finding(
            Level.WARNING,
            "its RAM cache gives one tenant's prompts to another; kvferry cannot prevent that",
            "restart it with --cache-ram 0, or set auth.share_cache: all",
        )
    if not info.keeps_idle_slots:
        yield Finding(
            Level.WARNING,
            "each request that starts empties its idle slots, so that only snapshots are reused "
            "(unified KV together with the RAM cache, both llama-server's defaults)",
            "restart it with --cache-ram 0",
        )
    elif layout is not None and layout.n_stream == 1 and info.n_slots > 1:
        yield Finding(
            Level.NOTE,
            f"its slots share {info.n_ctx:,} tokens of KV: a long one can push others out",
            # Not unified, -c is divided among the slots (llama-server.md section 3).
            f"--no-kv-unified -np {info.n_slots} -c {info.n_slots * info.n_ctx} gives each slot as"
            " much of its own, where memory allows",
        )


def _words(facts: Facts) -> Iterator[Finding]:
    words = facts.words
    if words is None:
        return
    if words.why_whole is None:
        what = f"prompts become tokens piece by piece, cut at {words.n_specials} special tokens"
        yield Finding(Level.OK, what)
    else:
        what = f"every new prompt is tokenized whole, which is exact but slower: {words.why_whole}"
        yield Finding(Level.NOTE, what)
    if words.local is False:
        why = words.local_problem or "its tokens differ from the server's"
        yield Finding(
            Level.WARNING,
            f"the local tokenizer is not used: {why}",
            "point `tokenizer.path` at the .gguf that the server runs, or use mode: backend",
        )
    elif words.local:
        yield Finding(Level.OK, "the local tokenizer agrees with the server")


def file_name(path: str) -> str:
    """The last part of a path of whatever system the server runs on."""
    return path.replace("\\", "/").rsplit("/", 1)[-1]
