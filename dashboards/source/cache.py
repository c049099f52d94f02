"""The dashboard of the cache: benefit, cost, and reasons for computed tokens."""

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
    "Benefit and cost of the cache, and reasons for computed tokens.",
    {
        "Benefit": [
            Panel(
                "Prompt tokens reused",
                "Share of all prompt tokens that no backend computed. The tokens that are new in "
                "each request limit this share.",
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
                "Seconds of prefill that reuse avoided, in the dashboard's time range.",
                [(total("kvferry_prefill_avoided_seconds_total", CHOSEN), "avoided")],
                "s",
                Kind.NUMBER,
                width=6,
                height=5,
            ),
            Panel(
                "Stall of running streams",
                "Seconds that running streams stood still for saves, restores and prefills of the "
                "router, summed over the streams. Compare with the prefill avoided.",
                [(total("kvferry_stall_seconds_total", CHOSEN), "stood still")],
                "s",
                Kind.NUMBER,
                width=6,
                height=5,
            ),
            Panel(
                "Planned reuse that did not happen",
                "Share of the prompt tokens. Not near zero: other clients use the slots, or a "
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
                "As reported by the backends: reused from a slot or a file, or computed.",
                [(rate("kvferry_prompt_tokens_total", "source"), "{{source}}")],
                TOKENS_PER_S,
                width=12,
                stacked=True,
            ),
            Panel(
                "Prefill avoided, by source",
                "Seconds of prefill avoided in each second, by the source of the tokens. 1 is the "
                "work of one whole server.",
                [(rate("kvferry_prefill_avoided_seconds_total", "source", CHOSEN), "{{source}}")],
                width=12,
                stacked=True,
            ),
        ],
        "Cost": [
            Panel(
                "Time of saves, restores and rewriting",
                "Seconds in each second, of all backends. Saves and restores take time of the "
                "backends, rewriting takes time of the router.",
                [
                    (rate("kvferry_save_seconds_sum"), "save"),
                    (rate("kvferry_restore_seconds_sum"), "restore"),
                    (rate("kvferry_rewrite_seconds_sum"), "rewrite"),
                ],
                stacked=True,
            ),
            Panel(
                "Stalled streams, by reason",
                "Streams that stand still, on average. Mostly save: raise store.idle_save_after. "
                "Mostly restore: add slots.",
                [(rate("kvferry_stall_seconds_total", "action", CHOSEN), "{{action}}")],
                stacked=True,
            ),
            Panel(
                "State moved",
                "State bytes that the backends write (save) and read (restore). Far more written "
                "than read: raise store.min_tokens.",
                [(rate("kvferry_moved_bytes_total", "action"), "{{action}}")],
                "Bps",
            ),
        ],
        "Reasons for computed tokens": [
            Panel(
                "Plans, by source of the prefix",
                "Much cold with long prompts: the prompts differ early, or too little is kept.",
                [(rate("kvferry_plans_total", "source"), "{{source}}")],
                "reqps",
                stacked=True,
            ),
            Panel(
                "Tokens computed, by reason",
                "Why tokens were computed, not reused; kvferry explain shows this for one request.",
                [(rate("kvferry_missed_tokens_total", "reason"), "{{reason}}")],
                TOKENS_PER_S,
                stacked=True,
            ),
            Panel(
                "Planned and actual reuse",
                "Tokens planned for reuse but computed, and tokens reused beyond the plan.",
                [
                    (rate("kvferry_reuse_overestimated_tokens_total"), "not reused"),
                    (rate("kvferry_reuse_underestimated_tokens_total"), "beyond the plan"),
                ],
                TOKENS_PER_S,
            ),
            Panel(
                "Prompts read wrongly",
                "Prompts of which a backend counted other tokens than kvferry; its log says why.",
                [(rate("kvferry_prompts_misread_total", "backend"), "{{backend}}")],
                "reqps",
            ),
        ],
    },
)
