"""Gather facts about one backend for `kvferry doctor`, by requests and by trials.

`findings.py` judges them. Slot contents are put back, and written files are removed.
"""

import asyncio
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from router.assembly.backends import StartError, client_of, timeouts_of
from router.base.errors import BackendError, KvError
from router.base.ports import SnapshotStore
from router.base.tasks import Tasks
from router.base.types import KvDir, MemoryKind, Namespace, StagedFile
from router.config.schema import BackendConfig, Config, TokenizerMode
from router.llama.attach.diagnosis import Trouble, Unusable, unusable
from router.llama.attach.learning import Attached, attach
from router.llama.attach.media_sample import media_sample
from router.llama.attach.probe import Probe
from router.llama.attach.probe_slots import SlotFolder, discard, put_aside
from router.llama.client import LlamaClient
from router.llama.replies import Props, slots_from
from router.llama.server_client import Connections
from router.prompts.local_tokenizer import LocalTokenizer, LocalTokenizerError, load_local
from router.prompts.special_tokens import discover_specials
from router.prompts.tokenizer import SegmentTokenizer
from router.store import files, shapes
from router.store.files import os_errors


@dataclass(frozen=True, slots=True)
class Folder:
    """The kv_dir of a backend, as this process sees it."""

    is_folder: bool = False
    mode: int = 0
    uid: int = -1
    usable: bool = False  # this process can list, create and remove files in it
    identity: tuple[int, int] = (-1, -1)  # device, inode
    group_access: bool = False  # store.group_access: the group may use the directory


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A state file that a backend wrote."""

    mode: int
    uid: int


@dataclass(frozen=True, slots=True)
class Words:
    """Facts about tokenizing: special tokens, and the local tokenizer."""

    n_specials: int
    why_whole: str | None  # why texts are not cut at special tokens; None: they are
    local: bool | None  # the local tokenizer agrees; None: none is configured
    local_problem: str = ""


@dataclass(slots=True)
class Facts:
    """Facts about one backend. None and "": not known, because an earlier step failed."""

    backend: BackendConfig
    unusable: Unusable | None = None
    folder: Folder | None = None  # of kv_dir; None: none is configured
    props: Props | None = None
    speculative: bool = False
    actions: bool = True  # False: started without --slot-save-path
    attached: Attached | None = None
    saved: SavedFile | None = None
    unseen: str = ""  # name of a file that the backend saved and that is not in kv_dir
    untried: str = ""  # why the probe was skipped
    words: Words | None = None

    @property
    def name(self) -> str:
        return self.backend.name


class DirectoryProbeStore:
    """The part of ports.SnapshotStore that a probe uses, for one directory.

    It takes no lock and writes no records: a router may be using the same directory.
    """

    def __init__(self) -> None:
        self.saved: SavedFile | None = None  # the last file found
        self.unseen = ""  # name of the last file that was missing

    def is_on_disk(self, _: KvDir) -> bool:
        return True

    def staging_name(self) -> str:
        """Return a name that a later router removes at its start if this process dies."""
        return files.staging_name()

    async def verify(
        self, kv_dir: KvDir, name: str, size_bytes: int, kind: MemoryKind | None = None
    ) -> StagedFile:
        """Check and pad a file that a backend wrote, as the real store does. Raises KvError."""
        with os_errors(name):
            found = await asyncio.to_thread(_verify, Path(kv_dir) / name, size_bytes, kind)
        return StagedFile(kv_dir, name, found.head.tokens, found.identity.size_bytes, found.shape)

    async def discard(self, kv_dir: KvDir, name: str) -> None:
        """Remove a file that a backend wrote, if it exists. Raises KvError."""
        with os_errors(name):
            await asyncio.to_thread(self._discard, Path(kv_dir) / name)

    def _discard(self, path: Path) -> None:
        try:
            status = path.lstat()
        except FileNotFoundError:
            self.unseen = path.name
            return
        self.saved = SavedFile(stat.S_IMODE(status.st_mode), status.st_uid)
        path.unlink(missing_ok=True)


def _verify(path: Path, size_bytes: int, kind: MemoryKind | None) -> shapes.Inspected:
    return shapes.pad(path, shapes.inspect(path, size_bytes, kind))


async def gather(
    backend: BackendConfig, config: Config, connections: Connections, known: set[Namespace]
) -> Facts:
    """Gather everything about one backend. Problems of the backend become facts, not errors."""
    facts = Facts(backend)
    if backend.kv_dir is not None:
        shared = config.store.group_access
        facts.folder = await asyncio.to_thread(inspect_folder, Path(backend.kv_dir), shared)
    try:
        client = client_of(backend, connections, timeouts_of(config))
        props = await _ask(client, facts)
        await _try_out(client, facts, props, known, tenants=config.auth.keeps_apart)
        if config.tokenizer.mode is not TokenizerMode.OFF:
            facts.words = await _words(client, props, config)
    except StartError as error:
        facts.unusable = Unusable(Trouble.NO_KEY, str(error))
    except (BackendError, KvError) as error:
        facts.unusable = unusable(error, answered=facts.props is not None)
    return facts


def inspect_folder(path: Path, group_access: bool) -> Folder:
    """Examine the directory `path`. Blocking."""
    try:
        status = path.stat()
        is_folder = stat.S_ISDIR(status.st_mode)
    except OSError:
        return Folder()
    return Folder(
        is_folder=is_folder,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        usable=is_folder and os.access(path, os.R_OK | os.W_OK | os.X_OK),
        identity=(status.st_dev, status.st_ino),
        group_access=group_access,
    )


async def _ask(client: LlamaClient, facts: Facts) -> Props:
    """Gather the facts that need no slot. Raises BackendError."""
    await client.health()
    props = await client.props()
    await client.models()
    status, payload = await _raw(client, "GET", "/slots")
    slots = slots_from(payload) if status == 200 else []
    # llama-server checks --slot-save-path first and refuses an unknown action without effect.
    status, _ = await _raw(client, "POST", "/slots/0?action=none", b"{}")
    facts.speculative = any(slot.speculative for slot in slots)
    facts.props, facts.actions = props, status != 501
    return props


async def _try_out(
    client: LlamaClient, facts: Facts, props: Props, known: set[Namespace], *, tenants: bool
) -> None:
    """Attach and probe the backend as `serve` would. Raises BackendError."""
    folder, kv_dir = facts.folder, None
    if folder is not None and folder.usable and facts.actions:
        kv_dir = KvDir(str(facts.backend.kv_dir))
    store = DirectoryProbeStore()
    # The probe uses only the three methods of DirectoryProbeStore.
    own = cast(SnapshotStore, store)
    place = None if kv_dir is None else SlotFolder(own, kv_dir)
    facts.untried = await _why_untried(client, props, place)
    facts.attached = await attach(
        client,
        props,
        folder=place,
        extra_models=facts.backend.models,
        probe=None
        if facts.untried
        else Probe(client, place, tenants=tenants, sample=media_sample(props)),
        known=known,
    )
    # A refused save leaves no file either, and is no reason to report a missing file.
    facts.saved = store.saved
    if facts.attached.probe.can_save or facts.untried:
        facts.unseen = store.unseen


async def _why_untried(client: LlamaClient, props: Props, folder: SlotFolder | None) -> str:
    """Return why a probe would be impossible or destroy KV; "" if it is safe."""
    if not props.endpoint_slots:
        return "its GET /slots is off (--no-slots), so its slots cannot be seen"
    idle = [slot for slot in await client.slots() if not slot.is_processing]
    if not idle:
        return "every slot is busy"
    if any(not slot.n_tokens for slot in idle):
        return ""
    used = min(idle, key=lambda slot: slot.n_tokens or 0)  # the slot that the probe will take
    name = await put_aside(client, folder, used)
    if folder is None or name is None:
        return "every idle slot holds KV that could not be put back"
    await discard(folder, name)
    return ""


async def _words(client: LlamaClient, props: Props, config: Config) -> Words | None:
    tasks = Tasks()
    try:
        specials = await discover_specials(
            props.chat_template, props.bos_token, props.eos_token, client.tokenize
        )
        local, problem = await _local(config, tuple(specials))
        tokenizer = SegmentTokenizer(client.tokenize, specials, spawn=tasks.spawn)
        why_whole = await tokenizer.self_check(local)
    except BackendError:
        return None
    finally:
        await tasks.aclose()
    agrees = None if config.tokenizer.path is None else tokenizer.uses_local
    return Words(len(tokenizer.specials), why_whole, agrees, problem)


async def _local(config: Config, specials: tuple[str, ...]) -> tuple[LocalTokenizer | None, str]:
    path = config.tokenizer.path
    if path is None:
        return None, ""
    try:
        return await asyncio.to_thread(load_local, Path(path), specials), ""
    except LocalTokenizerError as error:
        return None, str(error)


async def _raw(
    client: LlamaClient, method: str, path: str, body: bytes | None = None
) -> tuple[int, bytes]:
    """Return status and body of a call, also of a refused one. Raises BackendError."""
    headers = [(b"Content-Type", b"application/json")] if body is not None else []
    async with client.relay(method, path, headers, body) as response:
        return response.status, await response.read()
