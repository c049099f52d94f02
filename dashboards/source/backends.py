"""What each llama-server and its slots do."""

from dashboards.source.panels import Dashboard, Kind, Panel, share_gauge
from dashboards.source.queries import CHOSEN, TOKENS_PER_S, rate

BACKENDS = Dashboard(
    "kvferry-backends",
    "kvferry: backends and slots",
    "What each llama-server and its slots do, and how fast they are.",
    {
        "Now": [
            Panel(
                "Backends up",
                "/kvferry/health says what is wrong with those that are neither up nor drained.",
                [
                    (f"sum(kvferry_backend_up{{{CHOSEN}}})", "up"),
                    (f"sum(kvferry_backend_drained{{{CHOSEN}}})", "drained"),
                    (f"count(kvferry_backend_up{{{CHOSEN}}})", "configured"),
                ],
                kind=Kind.NUMBER,
                width=4,
                height=6,
                base="red",
                levels={1: "green"},
            ),
            share_gauge(
                "Slots in use",
                "Share of the slots that are not idle. At 1 for long: requests wait.",
                [
                    (
                        f'sum(kvferry_slots{{{CHOSEN},phase!~"idle|lost"}})'
                        f' / sum(kvferry_slots{{{CHOSEN},phase!="lost"}})',
                        "in use",
                    )
                ],
                levels={0.8: "orange", 0.95: "red"},
                width=4,
            ),
            Panel(
                "What was found out",
                "snapshots 0: nothing is saved or restored there; /kvferry/state shows the "
                "problem. Another n_stream within one model: restores rewrite the file.",
                [(f"kvferry_backend_info{{{CHOSEN}}}", "")],
                kind=Kind.TABLE,
                width=16,
                height=6,
            ),
        ],
        "Slots": [
            Panel(
                "Slots by phase",
                "draining that does not end: a server goes on computing for a client that left.",
                [(f"sum by (phase) (kvferry_slots{{{CHOSEN}}})", "{{phase}}")],
                stacked=True,
            ),
            Panel(
                "Running, by backend",
                "Streams at this moment.",
                [(f'sum by (backend) (kvferry_slots{{{CHOSEN},phase="running"}})', "{{backend}}")],
                stacked=True,
            ),
            Panel(
                "Tokens in the slots",
                "Whose KV is there. Falls to 0 again and again: the server empties idle slots "
                "(--cache-ram 0 stops that) or restarts.",
                [(f"kvferry_resident_tokens{{{CHOSEN}}}", "{{backend}}")],
                stacked=True,
            ),
        ],
        "Work": [
            Panel(
                "Requests, by backend",
                "That reached it, however they ended.",
                [(rate("kvferry_backend_requests_total", "backend", CHOSEN), "{{backend}}")],
                "reqps",
                stacked=True,
            ),
            Panel(
                "Backend errors",
                "Died, hung or closed before the end. Its own log says why.",
                [
                    (
                        rate(
                            "kvferry_backend_requests_total",
                            "backend",
                            f'{CHOSEN},outcome="backend_error"',
                        ),
                        "{{backend}}",
                    )
                ],
                "reqps",
                levels={0.01: "red"},
            ),
            Panel(
                "Prefill avoided, by backend",
                "Seconds in each second.",
                [(rate("kvferry_prefill_avoided_seconds_total", "backend", CHOSEN), "{{backend}}")],
                stacked=True,
            ),
        ],
        "Learned speeds": [
            Panel(
                "Prefill",
                "For a prompt of 1,000 tokens. Falls: somebody else uses the machine, or it "
                "throttles.",
                [(f"kvferry_prefill_tokens_per_second{{{CHOSEN}}}", "{{backend}}")],
                TOKENS_PER_S,
                width=6,
            ),
            Panel(
                "Generation",
                "Of one stream.",
                [(f"kvferry_output_tokens_per_second{{{CHOSEN}}}", "{{backend}}")],
                TOKENS_PER_S,
                width=6,
            ),
            Panel(
                "Save",
                "For a state of 1,000 tokens. Falls: the disk.",
                [(f"kvferry_save_bytes_per_second{{{CHOSEN}}}", "{{backend}}")],
                "Bps",
                width=6,
            ),
            Panel(
                "Restore",
                "For a state of 1,000 tokens. Falls: the disk, or a cold page cache.",
                [(f"kvferry_restore_bytes_per_second{{{CHOSEN}}}", "{{backend}}")],
                "Bps",
                width=6,
            ),
        ],
        "What the servers say themselves (scrape with ?backends=1, servers with --metrics)": [
            Panel(
                "Scraped",
                "1: the server gave its metrics.",
                [(f"kvferry_backend_scrape_up{{{CHOSEN}}}", "{{backend}}")],
                width=6,
                highest=1,
            ),
            Panel(
                "Requests being processed",
                "Beside the slots that run: a difference is somebody else's traffic.",
                [(f"llamacpp:requests_processing{{{CHOSEN}}}", "{{backend}}")],
                width=6,
                stacked=True,
            ),
            Panel(
                "Prompt tokens computed",
                "By each server, whoever asked.",
                [(rate("llamacpp:prompt_tokens_total", "backend", CHOSEN), "{{backend}}")],
                TOKENS_PER_S,
                width=6,
                stacked=True,
            ),
            Panel(
                "Tokens generated",
                "By each server, whoever asked.",
                [(rate("llamacpp:tokens_predicted_total", "backend", CHOSEN), "{{backend}}")],
                TOKENS_PER_S,
                width=6,
                stacked=True,
            ),
        ],
    },
)
