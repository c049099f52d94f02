"""Is it worth it, what does it cost, and why not more."""

from dashboards.source.panels import Dashboard, Kind, Panel
from dashboards.source.queries import CHOSEN, SHARE, TOKENS_PER_S, rate, total

_REUSED = 'source!="computed"'
_REUSED_SHARE = (
    f"{rate('kvferry_prompt_tokens_total', matching=_REUSED)}"
    f" / {rate('kvferry_prompt_tokens_total')}"
)

CACHE = Dashboard(
    "kvferry-cache",
    "kvferry: cache",
    "Is it worth it, what did it cost, and why not more.",
    {
        "Is it worth it": [
            Panel(
                "Prompt tokens reused",
                "Share of all prompt tokens that nobody had to compute. It cannot get beyond the "
                "tokens that are new in each request.",
                [(_REUSED_SHARE, "reused")],
                SHARE,
                Kind.NUMBER,
                width=6,
                height=5,
                base="red",
                levels={0.25: "orange", 0.5: "green"},
                highest=1,
            ),
            Panel(
                "Prefill avoided",
                "Seconds that the reused tokens would have taken, in the time that is shown.",
                [(total("kvferry_prefill_avoided_seconds_total", CHOSEN), "avoided")],
                "s",
                Kind.NUMBER,
                width=6,
                height=5,
            ),
            Panel(
                "Streams stood still",
                "Seconds that running streams waited for saves, restores and prefills of the "
                "router, summed over the streams. Hold it against the prefill avoided.",
                [(total("kvferry_stall_seconds_total", CHOSEN), "stood still")],
                "s",
                Kind.NUMBER,
                width=6,
                height=5,
            ),
            Panel(
                "Planned reuse that did not happen",
                "Share of the prompt tokens. Not near zero: somebody else uses the slots, or a "
                "server empties them; run kvferry doctor.",
                [
                    (
                        f"{rate('kvferry_reuse_overestimated_tokens_total')}"
                        f" / {rate('kvferry_prompt_tokens_total')}",
                        "not reused",
                    )
                ],
                SHARE,
                Kind.NUMBER,
                width=6,
                height=5,
                levels={0.01: "orange", 0.05: "red"},
            ),
            Panel(
                "Prompt tokens",
                "As the backends reported them: reused from slot or file, or computed.",
                [(rate("kvferry_prompt_tokens_total", "source"), "{{source}}")],
                TOKENS_PER_S,
                width=12,
                stacked=True,
            ),
            Panel(
                "Prefill avoided, by source",
                "Seconds of prefill avoided in each second, by where the tokens came from: 1 is a "
                "whole server's work.",
                [(rate("kvferry_prefill_avoided_seconds_total", "source", CHOSEN), "{{source}}")],
                width=12,
                stacked=True,
            ),
        ],
        "What it costs": [
            Panel(
                "Time of saves, restores and rewriting",
                "Seconds in each second, of all backends. Saves and restores are the backends' "
                "time, rewriting is the router's.",
                [
                    (rate("kvferry_save_seconds_sum"), "save"),
                    (rate("kvferry_restore_seconds_sum"), "restore"),
                    (rate("kvferry_rewrite_seconds_sum"), "rewrite"),
                ],
                stacked=True,
            ),
            Panel(
                "Streams that stand still",
                "How many streams stand still on average, by reason. Mostly save: raise "
                "store.idle_save_after. Mostly restore: more slots.",
                [(rate("kvferry_stall_seconds_total", "action", CHOSEN), "{{action}}")],
                stacked=True,
            ),
            Panel(
                "State moved",
                "Bytes that the backends write (save) and read (restore). Far more written than "
                "read: raise store.min_tokens.",
                [(rate("kvferry_moved_bytes_total", "action"), "{{action}}")],
                "Bps",
            ),
        ],
        "Why not more": [
            Panel(
                "Where plans took their prefix from",
                "Requests. Much cold with long prompts: they differ early, or too little is kept.",
                [(rate("kvferry_plans_total", "source"), "{{source}}")],
                "reqps",
                stacked=True,
            ),
            Panel(
                "Tokens computed, by reason",
                "Why what was computed was not reused; `kvferry explain` says it of one request.",
                [(rate("kvferry_missed_tokens_total", "reason"), "{{reason}}")],
                TOKENS_PER_S,
                stacked=True,
            ),
            Panel(
                "Plan and reality",
                "Tokens planned as reused that were not, and those reused beyond the plan.",
                [
                    (rate("kvferry_reuse_overestimated_tokens_total"), "not reused"),
                    (rate("kvferry_reuse_underestimated_tokens_total"), "beyond the plan"),
                ],
                TOKENS_PER_S,
            ),
        ],
    },
)
