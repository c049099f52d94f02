"""Costs of a simulated server: seconds and bytes for each token, for a load and a stop; presets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.base.types import BackendId
from router.core.model.servers import ServerLimit, ServerSpec

MS = 1e-3


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of server. Seconds, tokens, bytes.

    `prefill_depth_s` makes prefill superlinear: n tokens on top of d others take
    `prefill_s * n + prefill_depth_s * n * (d + n / 2)`.
    """

    prefill_s: float
    prefill_depth_s: float
    decode_s: float  # one step with one stream
    decode_more_s: float  # added to a step by each further stream
    bytes_per_token: int
    save_bytes_per_s: float
    restore_bytes_per_s: float
    rewrite_bytes_per_s: float
    transfer_s: float = 2 * MS  # base time of every save, restore and cut
    batch: int = 2048  # prompt tokens in one batch, llama-server's `-b`

    def prefill_of(self, tokens: int, depth: int) -> float:
        """Return the seconds to compute `tokens` after `depth` others, alone on the server."""
        return self.prefill_s * tokens + self.prefill_depth_s * tokens * (depth + tokens / 2)

    def step_of(self, streams: int) -> float:
        """Return the seconds of a step, in which each of `streams` gets one token."""
        return self.decode_s + self.decode_more_s * max(streams - 1, 0)

    def save_of(self, size_bytes: int) -> float:
        """Return the seconds for which a save stops the server."""
        return self.transfer_s + size_bytes / self.save_bytes_per_s

    def restore_of(self, size_bytes: int) -> float:
        """Return the seconds for which a restore stops the server."""
        return self.transfer_s + size_bytes / self.restore_bytes_per_s

    def rewrite_of(self, size_bytes: int) -> float:
        """Return the seconds to cut a file of `size_bytes` out of another; stops no server."""
        return self.transfer_s + size_bytes / self.rewrite_bytes_per_s

    def scaled(self, factor: int) -> "Hardware":
        """Return the same hardware where one token stands for `factor`.

        Seconds and bytes for a text stay equal, with fewer tokens to handle.
        """
        return replace(
            self,
            prefill_s=self.prefill_s * factor,
            prefill_depth_s=self.prefill_depth_s * factor * factor,
            decode_s=self.decode_s * factor,
            decode_more_s=self.decode_more_s * factor,
            bytes_per_token=self.bytes_per_token * factor,
            batch=max(self.batch // factor, 1),
        )


PRESETS = {
    # SmolLM2-135M on one CPU thread, as measured for the README and in llama-server.md: 5,028
    # tokens cold in 60 s, saved (116 MB) in 56 ms, restored in 36 ms. On a CPU each further
    # stream adds nearly a whole step (not measured).
    "cpu-small": Hardware(
        prefill_s=8.5 * MS,
        prefill_depth_s=1.4e-6,
        decode_s=25 * MS,
        decode_more_s=15 * MS,
        bytes_per_token=23_056,
        save_bytes_per_s=2.0e9,
        restore_bytes_per_s=3.2e9,
        rewrite_bytes_per_s=1.0e9,
    ),
    # An 8B model with grouped-query attention (f16: 128 KiB a token) on an upper mid-range GPU,
    # files on NVMe; a token costs twice as much at a depth of 32,000. Not measured.
    "gpu-8b": Hardware(
        prefill_s=0.4 * MS,
        prefill_depth_s=1.25e-8,
        decode_s=1 / 60,
        decode_more_s=1 * MS,
        bytes_per_token=128 * 1024,
        save_bytes_per_s=3.0e9,
        restore_bytes_per_s=5.0e9,
        rewrite_bytes_per_s=2.0e9,
    ),
}


@dataclass(frozen=True, slots=True)
class OnDemand:
    """Servers on demand, one for each model: `loaded` at a time; loads and stops in seconds."""

    loaded: int
    load_s: float
    stop_s: float
    max_wait_s: float

    def configured(self, names: Sequence[str]) -> tuple[list[ServerSpec], list[ServerLimit]]:
        """Return the servers, and what of them may be loaded together."""
        specs = [ServerSpec(BackendId(name), (name,), max_wait_s=self.max_wait_s) for name in names]
        return specs, [ServerLimit(frozenset(names), self.loaded)]
