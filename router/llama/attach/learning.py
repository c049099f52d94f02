"""Learning all facts of a backend when it is attached, and those that its probe finds."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from msgspec.structs import replace

from router.base.errors import BackendRefusedError
from router.base.tasks import in_thread, within
from router.base.types import BackendInfo, KvSettings, MemoryKind, Namespace, SlotStatus
from router.llama.attach.namespace import digest, model_digest, namespace, shown
from router.llama.attach.probe import Probe, is_still_so
from router.llama.attach.probe_result import ProbeResult
from router.llama.attach.probe_slots import SlotFolder, erase
from router.llama.client import LlamaClient
from router.llama.replies import ModelsInfo, Props
from router.store.format.head import VERSION

_DIGEST_S = 30.0  # for the digest of a model's file

# Returns what a probe of an equal process found; None: there was none.
Recall = Callable[[Props, ModelsInfo], ProbeResult | None]


NO_SETTINGS = KvSettings()
# Facts of `BackendInfo` that are the probe's, by the same names.
_AS_PROBED = (
    *("memory_kind", "keeps_idle_slots", "generates", "n_stream", "window", "cuts", "extends"),
    *("caches_by_default", "checkpoints", "bytes_per_token", "prefill_s_per_token"),
    *("output_s_per_token", "save_s", "restore_s"),
)


def nothing_known(*_: object) -> None:
    """Know of no equal process."""


@dataclass(frozen=True, slots=True)
class Attached:
    """All facts learned when a backend came up."""

    info: BackendInfo
    slots: tuple[SlotStatus, ...]
    props: Props
    models: ModelsInfo
    probe: ProbeResult
    recalled: bool = False  # the probe is that of an equal process before
    lora: bytes = b""  # the answer about its adapters


async def attach(
    client: LlamaClient,
    props: Props,
    *,
    folder: SlotFolder | None,
    extra_models: tuple[str, ...] = (),
    max_running: int | None = None,
    probe: Probe | None = None,
    known: set[Namespace] | None = None,
    only: Collection[int] | None = None,
    recall: Recall = nothing_known,
    settings: KvSettings = NO_SETTINGS,
    makes_way: Callable[[], bool] = lambda: False,
    empties_unknown: bool = False,
) -> Attached:
    """Learn all facts about a backend; go on with its `probe`. Raises BackendError.

    The probe uses any idle slot, or only the idle ones in `only`. No probe if one is recalled.
    `settings`: what is known of its command line beyond what it reports.
    `makes_way`: see `Probe.run`.
    `empties_unknown`: empty the other slots of a server with adapters.
    """
    models = await client.models()
    lora = await _lora(client)
    slots = await slots_of(client, props)
    allowed = [
        s if only is None or s.index in only else replace(s, is_processing=True) for s in slots
    ]
    for slot in allowed:
        if slot.adapted and not slot.is_processing:  # adapted KV is neither kept nor reused
            await erase(client, slot.index)
    recalled = recall(props, models)
    if recalled is not None and not await is_still_so(client, folder, allowed, recalled):
        recalled = None
    found = recalled or ProbeResult()
    if probe is not None and recalled is None:
        found = await probe.run(allowed, makes_way)
    seen = _seen(found, props, settings)
    facts = digest(props, models, lora, _layout_name(found, props), settings.flags)
    file = await _model_digest(props, models)
    info = BackendInfo(
        id=client.id,
        n_slots=props.total_slots,
        n_ctx=min((s.n_ctx for s in slots), default=props.n_ctx),
        namespace=namespace(facts, file, found.behaviour, known or set(), seen),
        models=models.names | set(extra_models),
        kv_dir=folder.kv_dir if folder and found.usable and found.keeps_idle_slots else None,
        on_disk=folder is not None and folder.store.is_on_disk(folder.kv_dir),
        max_running=max_running,
        unified=props.total_slots > 1 and found.unified,
        untried=found.untried and folder is not None,
        **{name: getattr(found, name) for name in _AS_PROBED},
    )
    after = tuple(await slots_of(client, props))
    if empties_unknown and has_adapters(lora):
        after = tuple(await _without_unknown(client, props, after))
    return Attached(info, after, props, models, found, recalled is not None, lora)


async def _without_unknown(
    client: LlamaClient, props: Props, slots: Sequence[SlotStatus]
) -> list[SlotStatus]:
    """Empty the slots of a server with adapters; return all anew.

    Adapters may be changed while the server runs. The KV in a slot may be that of others than now,
    and would be saved under the name of those of now.
    """
    for slot in slots:
        if not slot.is_processing:
            await erase(client, slot.index)
    unknown = [s.index for s in slots if s.is_processing]
    return [
        replace(s, adapted=True) if s.index in unknown else s for s in await slots_of(client, props)
    ]


def _seen(found: ProbeResult, props: Props, settings: KvSettings) -> str:
    """Return a digest of the projector; of an unknown one, of the process."""
    if found.unseen or (props.takes_media and not found.seen):
        return f"?{blake2b(repr(props.process).encode(), digest_size=8).hexdigest()}"
    return f"{settings.projector};{shown(found.seen)}" if found.seen else ""


def has_adapters(lora: bytes) -> bool:
    """Return whether an answer to `GET /lora-adapters` names any."""
    return lora.strip() not in (b"", b"[]")


async def _model_digest(props: Props, models: ModelsInfo) -> str:
    """Return the digest of the model's file; empty if its file system does not answer."""
    reading = in_thread(partial(model_digest, props.model_path, models.size), "model")
    with contextlib.suppress(TimeoutError):
        return await within(reading, _DIGEST_S, props.model_path)
    return ""


def _layout_name(found: ProbeResult, props: Props) -> str:
    """Return a name for the layout of state files; servers with one name take each other's files.

    Of an opaque layout only the size of the probe's file is known, which differs with types, layers
    and streams. It is the same only in the same build.
    """
    if found.layout is None:
        return ""
    if not found.layout.is_opaque:
        name, version = found.layout.fingerprint(), found.state_version
        if found.memory_kind is MemoryKind.FULL and len(found.layout.attention) > 1:
            name += " whole"  # no window of it is padded, as on a server without --swa-full
        return name if version in (0, VERSION) else f"{name} v{version}"
    return f"{props.build_info} v{found.state_version} {found.n_tokens} {found.size_bytes}"


async def slots_of(client: LlamaClient, props: Props) -> list[SlotStatus]:
    """Return the state of all slots. Raises BackendError."""
    try:
        return await client.slots()
    except BackendRefusedError:  # started with --no-slots: assume idle slots
        return [
            SlotStatus(index, is_processing=False, n_tokens=None, n_ctx=props.n_ctx)
            for index in range(props.total_slots)
        ]


async def _lora(client: LlamaClient) -> bytes:
    try:
        return await client.get("/lora-adapters")
    except BackendRefusedError:
        return b""
