"""Tuning: the constants of the core's decisions, each with its unit and its origin.

Not configuration: a wrong value costs time and never a right answer. "Chosen" means that no
measurement prefers the value to its neighbours. The delays of polls are in `engine/slot_watch.py`.
"""

from math import log

from msgspec import Struct

from router.base.types import RequestProgress


class Tuning(Struct, frozen=True):
    """All constants; `TUNING` is the only instance."""

    # -- serving the queue -----------------------------------------------------------------------

    # Requests planned after a change: the first of the queue each time, and as many of the rest.
    # Chosen: planning one takes tens of microseconds.
    scanned_at_once: int = 16
    # Seconds until the rest of the queue is planned. Chosen: well below a first token.
    resume_scan_after_s: float = 0.05
    # Oldest requests of each model that are checked for a backend that could serve them. Chosen.
    checked_for_backend: int = 32
    # Clients with a remembered server time. Chosen: about 1 MB (ADR 10).
    clients: int = 10_000
    # Seconds after a person's last request in which background requests leave the last slot free.
    # Chosen: a person who reads and writes comes back within five minutes, mostly. Where there is
    # one slot, the batch would never run: it waits for a gap of half a minute.
    last_slot_free_s: float = 300.0
    only_slot_free_s: float = 30.0
    # Seconds for which the snapshot is kept that a request in the queue begins with. Chosen: longer
    # than requests wait for a slot, and short enough to be of no use as a reservation.
    queued_prefix_kept_s: float = 60.0
    # Rank in the prefill queue by which background requests come after others, in seconds.
    background_behind_s: float = 1e6
    # Conversations that `sticky` remembers. Chosen: about 20 MB.
    sticky_keys: int = 100_000

    # -- prices ----------------------------------------------------------------------------------

    # Weight of the past after one observation of a rate: a change of load shows within about 20
    # observations. Chosen.
    rate_decay: float = 0.95
    # After `rate_settled` observations, a further one counts for at most `rate_surprise` times its
    # prediction. Chosen: one slow answer of a swapped-out server must not keep it unused.
    rate_settled: int = 3
    rate_surprise: float = 3.0
    # Probes of equal servers differ by up to this factor: each computes 100 to 200 tokens only.
    # Seen on shared machines.
    probes_differ: float = 2.0
    # Seconds that waiting for a probe's slot is priced at. On a CPU a probe takes about 1 s.
    probe_s: float = 1.0
    # Snapshots priced for each kind of backend: those that share most, of these the shortest.
    # Chosen: one that shares less could only win by being much smaller.
    snapshots_priced: int = 4
    # Candidates kept for an explanation. Chosen.
    losers: int = 12
    # Seconds within which prices may differ by rounding alone.
    equal_s: float = 1e-8

    # A state is fetched from another host if the request is then so much cheaper, by this factor
    # and by these seconds. Chosen: a fetch takes processor time on two hosts, which has no price.
    fetch_cheaper: float = 0.8
    fetch_gain_s: float = 0.02

    # Chance that a second prompt branches off from a prompt during its answer, where none has
    # before. Chosen: a save that costs a twentieth of the prefill is then worth it, as on a CPU.
    branch_chance: float = 0.05

    # An answer is generated at most so many times faster than its backend's usual speed. Chosen:
    # the usual speed is that beside other answers.
    output_fastest: float = 4.0

    # Cells of unified KV kept for an answer: so many usual lengths, at least so many. Chosen: if
    # the cells run out, all requests of the server fail.
    answer_cells: float = 4.0
    answer_cells_least: int = 256
    # An answer of more than so many usual lengths is not thought of. Chosen: one in 3,000.
    answer_longest: float = 8.0

    # -- what a backend can do -------------------------------------------------------------------

    # Fewest tokens of a slot by which a report on a prompt is compared with what was expected.
    # Chosen: a template's first tokens prove nothing.
    compared_tokens: int = 64
    # Seconds until a prompt is computed ahead again, on a backend where that was lost. Chosen.
    extends_again_s: float = 60.0

    # -- quotes ------------------------------------------------------------------------------------

    # Seconds after which a slot counts as free in a quote, if nothing is known of its end. Chosen.
    unknown_end_s: float = 10.0
    # Share of a usual answer that is still to come where it should have ended. Chosen: with 0 a
    # host with late answers quotes no wait, and gets requests that wait for seconds.
    late_share: float = 0.5

    # -- waiting for a busy slot -----------------------------------------------------------------

    # Seconds until an abandoned slot is known to be idle, by how far its request had got: the wait
    # is priced at this for a client that comes back at once. From the delays of the polls in
    # `engine/slot_watch.py`, and from the second until a server notices (llama-server.md 5.6).
    abandoned_answered_s: float = 0.01
    abandoned_begun_s: float = 0.03
    abandoned_sent_s: float = 1.5
    # Seconds after which an abandoned slot that should be idle is no longer waited for: its server
    # has not noticed that the client disconnected. Chosen above the 1.2 s between polls.
    abandoned_trusted_s: float = 2.0
    # Seconds after which a shared prefill is no longer expected: all that wait for it would begin
    # it anew. Chosen: long, since they lose all of it.
    shared_prefill_late_s: float = 60.0

    # -- the prefill queue (ADR 13) --------------------------------------------------------------

    # Weight of a second in the queue against a second to compute. A chunk may take twice as long
    # as predicted before an equal prompt overtakes it. Chosen.
    prefill_patience: float = 0.5
    # Seconds: a chunk may be late by as much as it was predicted to take, within these limits.
    # Chosen.
    chunk_overrun_least_s: float = 0.5
    chunk_overrun_most_s: float = 5.0
    # Seconds after which two prompts are computed side by side. Chosen (ADR 13).
    permit_longest_s: float = 10.0
    # Seconds from the end of a prefill to the first token; a longer delay has another cause.
    # Chosen.
    handed_over_s: float = 0.5

    # -- prefill chunks (ADR 12) -----------------------------------------------------------------

    # Tokens that the server computes in one go by default (`--ubatch-size`): fewer are slower.
    chunk_least: int = 512
    # Factor on a chunk with no other beside it: later requests wait for it. Chosen (ADR 12).
    chunk_alone: float = 4.0
    # Half a chunk or less is not left over as a chunk of its own. Chosen.
    chunk_last: float = 1.5

    # -- snapshots -------------------------------------------------------------------------------

    # Failed writes in a row that are forgiven: a state that can never be saved (media without a
    # file form) says nothing about the next one. Then seconds without writes, doubled each time.
    # Chosen: a full disk stays so for minutes.
    write_failures_forgiven: int = 1
    write_backoff_first_s: float = 1.0
    write_backoff_most_s: float = 60.0
    # Failed restores until a file is quarantined. The server's answer does not tell a lack of room
    # from a bad file (llama-server.md section 1.1), so the first is forgiven.
    restore_strikes: int = 2
    # Evictions in one call. Chosen: each takes up to 0.1 ms.
    evicted_at_once: int = 32
    # Revaluations in one call. Chosen: 2 ms, longer with many backends.
    valued_at_once: int = 200
    # Width of a class of about equal value, in log(value) (ADR 15). Chosen.
    eviction_class_width: float = log(1.2)
    # Tokens that a ghost list keeps: four bytes each and as much again in the index, 16 MB. Chosen.
    ghost_tokens: int = 2 * 1024 * 1024
    # Slots lent to a probe: one to try things in, one to see whether a start clears it.
    probe_slots: int = 2

    # -- servers on demand (ADR 20) --------------------------------------------------------------

    # Seconds to load a model and to stop its server, before either was measured. Chosen: a model
    # of some gigabytes from a disk that is not in the cache.
    server_load_s: float = 10.0
    server_stop_s: float = 1.0
    # A model with requests keeps its room for so many times what a swap takes: with requests for
    # both all the time, one part in six is lost to swaps. With 4, ten clients made 11 to 21 swaps
    # in ten runs, close to the bar, which is a third of 68.
    server_slice: float = 5.0
    # A model without requests keeps its room for this part of what it takes to stop and load it
    # again, if in this share of cases the next request came by then. Of 20 simulated crowds (three
    # models, two loaded) the most swaps against first come, first served were 0.32 of them with
    # 0.3, 0.33 with 0.2 and 0.28 with 0.5; the last answer came 3 and 10 % later than with 0.2.
    server_linger: float = 0.3
    server_soon: float = 0.5
    # Seconds in which the first request comes, to a server that was started for requests.
    server_stay_s: float = 2.0
    # Seconds to attach a server that is ready, and seconds without an answer after which a server
    # is ended. Chosen: a probe on a slow CPU takes ten; a server answers polls between batches.
    server_attach_s: float = 120.0
    server_hangs_s: float = 60.0
    # Seconds between starts of a server that ends by itself, doubled each time; up for so many
    # seconds, it counts as well again. After so many failures in a row, requests are refused, and
    # the next start is tried for a request that comes later. Chosen.
    server_backoff_first_s: float = 1.0
    server_backoff_most_s: float = 30.0
    server_well_s: float = 60.0
    server_failures: int = 4
    server_given_up_s: float = 60.0
    # A server that ends within so many seconds after a request failed there may have ended because
    # of that request. The guard reports an end within a second. Chosen.
    server_suspect_s: float = 5.0

    def abandoned_s(self, progress: RequestProgress) -> float:
        """Return the seconds until an abandoned slot is known to be idle."""
        match progress:
            case RequestProgress.ANSWERED:
                return self.abandoned_answered_s
            case RequestProgress.BEGUN:
                return self.abandoned_begun_s
            case _:
                return self.abandoned_sent_s


TUNING = Tuning()
