"""A backend that came up: what was learned of it, and who is told."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from router.base.types import BackendId, BackendInfo, KvSettings, Namespace, SlotStatus
from router.llama.attach.probe_result import ProbeResult
from router.llama.client import LlamaClient
from router.llama.replies import InfillAnswer, ModelsInfo, Props


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


class BackendListener(Protocol):
    """The router around a monitor: what it is told of a backend, and what it is asked."""

    def up(self, attached: Attached) -> None:
        """Take a backend into use."""

    def down(self, backend: BackendId) -> None:
        """Take a backend out of use."""

    def no_llama_server(self, backend: BackendId, reason: str) -> None:
        """Note that what answers for a backend can never be one."""

    def probed(self, attached: Attached, kept: frozenset[int]) -> None:
        """Take the result of a probe; the borrowed slots come back.

        `kept`: those that hold what they held.
        """

    def misnamed(self, name: Namespace, ago_s: float) -> None:
        """Note that states saved under a name within `ago_s` may be of other adapters."""

    def borrow(self, backend: BackendId) -> Collection[int]:
        """Return the idle slots that a probe may use, until `probed` or `down`."""

    def poll_for_strangers(self, backend: BackendId) -> None:
        """Look for unknown clients of a backend, in the background."""

    def is_in_the_way(self, backend: BackendId) -> bool:
        """Return whether a probe of the backend would delay a request: one waits or runs."""

    def known_namespaces(self) -> set[Namespace]:
        """Return all namespaces that a backend could belong to."""

    async def prepare(
        self,
        client: LlamaClient,
        props: Props,
        namespace: Namespace,
        infill: tuple[InfillAnswer, ...],
        recalled: bool,
    ) -> None:
        """Learn how a backend tokenizes; `recalled`: it is as before. Raises BackendError."""

    def recall(self, backend: BackendId, props: Props, models: ModelsInfo) -> ProbeResult | None:
        """Return the probe's result for an equal process; None: there is none."""

    def settings_of(self, backend: BackendId) -> KvSettings:
        """Return the settings of a backend's command line that decide its KV; perhaps none."""
