"""The dashboard of the llama-servers and their slots."""

from dashboards.source.panels import Dashboard, Kind, Panel, share_gauge
from dashboards.source.queries import CHOSEN, TOKENS_PER_S, rate

BACKENDS = Dashboard(
    "kvferry-backends",
    "kvferry: backends and slots",
    "Each llama-server and its slots: work and speed.",
    {
        "Now": [
            Panel(
                "Backends up",
                "Neither up nor drained: /kvferry/health has the problem of the backend.",
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
                "Results of the probe",
                "snapshots 0: nothing is saved or restored there; /kvferry/state shows the "
                "problem. Different n_stream within one model: each restore rewrites the file.",
                [(f"kvferry_backend_info{{{CHOSEN}}}", "")],
                kind=Kind.TABLE,
                width=16,
                height=6,
            ),
        ],
        "Slots": [
            Panel(
                "Slots by phase",
                "abandoned for long: a server goes on computing after its client disconnected.",
                [(f"sum by (phase) (kvferry_slots{{{CHOSEN}}})", "{{phase}}")],
                stacked=True,
            ),
            Panel(
                "Running, by backend",
                "Slots with a running request.",
                [(f'sum by (backend) (kvferry_slots{{{CHOSEN},phase="running"}})', "{{backend}}")],
                stacked=True,
            ),
            Panel(
                "Tokens in the slots",
                "Tokens with KV in the slots, as the router believes. Falls to 0 again and again: "
                "the server restarts, or empties idle slots (prevented by --cache-ram 0).",
                [(f"kvferry_resident_tokens{{{CHOSEN}}}", "{{backend}}")],
                stacked=True,
            ),
        ],
        "Servers on demand": [
            Panel(
                "Phases",
                "Servers that kvferry starts. failed: kvferry servers list has the reason.",
                [("sum by (phase) (kvferry_server_phase)", "{{phase}}")],
                stacked=True,
            ),
            Panel(
                "Waiting, by server",
                "Requests for a model that is not loaded, or has no free slot.",
                [("kvferry_server_waiting", "{{server}}")],
                stacked=True,
            ),
            Panel(
                "Swaps and loads",
                "Models stopped for another one, per second, and the learned seconds of a load.",
                [
                    (rate("kvferry_server_swaps_total"), "swaps"),
                    ("kvferry_server_load_seconds", "load {{server}}"),
                ],
            ),
        ],
        "Other hosts": [
            Panel(
                "Peers in use",
                "Hosts that requests may go to. kvferry fleet status says why one is not used.",
                [("sum(kvferry_peer_up)", "up"), ("count(kvferry_peer_up)", "known")],
            ),
            Panel(
                "Forwarded, by host",
                "Requests sent to other hosts, and received from them.",
                [
                    (
                        rate("kvferry_forwarded_requests_total", "peer, outcome"),
                        "to {{peer}}: {{outcome}}",
                    ),
                    (rate("kvferry_received_requests_total", "peer"), "from {{peer}}"),
                ],
                "reqps",
            ),
            Panel(
                "Quotes",
                "Quotes asked of other hosts, by result. none: not in time.",
                [(rate("kvferry_peer_quotes_total", "peer, result"), "{{peer}}: {{result}}")],
                "reqps",
            ),
            Panel(
                "Time of a quote",
                "Until other hosts have answered; 10 ms is the usual limit.",
                [
                    (
                        "histogram_quantile(0.95, sum by (le) "
                        "(rate(kvferry_peer_quote_seconds_bucket[$__rate_interval])))",
                        "95 %",
                    )
                ],
                "s",
            ),
            Panel(
                "Load and lateness, by host",
                "Requests for each slot of a host, and seconds by which it was later than quoted.",
                [
                    ("kvferry_peer_busy_ratio", "load {{peer}}"),
                    ("kvferry_peer_late_seconds", "late {{peer}} (s)"),
                ],
            ),
            Panel(
                "Fetched states, by host",
                "States fetched from other hosts instead of computed, per second, by result.",
                [(rate("kvferry_fetches_total", "peer, result"), "{{peer}}: {{result}}")],
                "ops",
            ),
            Panel(
                "Bytes of fetched states",
                "Bytes that came from other hosts, and that they fetched here.",
                [
                    (rate("kvferry_fetched_bytes_total", "peer"), "from {{peer}}"),
                    (rate("kvferry_handed_out_bytes_total"), "handed out"),
                ],
                "Bps",
            ),
            Panel(
                "Time of a fetch",
                "From the question to the snapshot.",
                [
                    (
                        "histogram_quantile(0.95, sum by (le) "
                        "(rate(kvferry_fetch_seconds_bucket[$__rate_interval])))",
                        "95 %",
                    )
                ],
                "s",
            ),
            Panel(
                "Directory",
                "Redis or Valkey: whether it answers.",
                [("kvferry_directory_up", "up")],
            ),
        ],
        "Work": [
            Panel(
                "Requests, by backend",
                "Requests that reached each backend, with any outcome.",
                [(rate("kvferry_backend_requests_total", "backend", CHOSEN), "{{backend}}")],
                "reqps",
                stacked=True,
            ),
            Panel(
                "Backend errors",
                "The backend died, hung or closed the connection before the end; its log says why.",
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
                "Seconds of prefill avoided in each second.",
                [(rate("kvferry_prefill_avoided_seconds_total", "backend", CHOSEN), "{{backend}}")],
                stacked=True,
            ),
        ],
        "Learned speeds": [
            Panel(
                "Prefill",
                "For a prompt of 1,000 tokens. Falls: other programs use the machine, or it "
                "throttles.",
                [(f"kvferry_prefill_tokens_per_second{{{CHOSEN}}}", "{{backend}}")],
                TOKENS_PER_S,
                width=6,
            ),
            Panel(
                "Generation",
                "Speed of one stream.",
                [(f"kvferry_output_tokens_per_second{{{CHOSEN}}}", "{{backend}}")],
                TOKENS_PER_S,
                width=6,
            ),
            Panel(
                "Save",
                "For a state of 1,000 tokens. Falls: the disk is slow.",
                [(f"kvferry_save_bytes_per_second{{{CHOSEN}}}", "{{backend}}")],
                "Bps",
                width=6,
            ),
            Panel(
                "Restore",
                "For a state of 1,000 tokens. Falls: the disk is slow, or the page cache is cold.",
                [(f"kvferry_restore_bytes_per_second{{{CHOSEN}}}", "{{backend}}")],
                "Bps",
                width=6,
            ),
        ],
        "The servers' own metrics (scrape with ?backends=1, start llama-server with --metrics)": [
            Panel(
                "Scraped",
                "1: the server returned its metrics.",
                [(f"kvferry_backend_scrape_up{{{CHOSEN}}}", "{{backend}}")],
                width=6,
                highest=1,
            ),
            Panel(
                "Requests being processed",
                "Differs from the running slots: other clients use the server directly.",
                [(f"llamacpp:requests_processing{{{CHOSEN}}}", "{{backend}}")],
                width=6,
                stacked=True,
            ),
            Panel(
                "Prompt tokens computed",
                "By each server, for all clients.",
                [(rate("llamacpp:prompt_tokens_total", "backend", CHOSEN), "{{backend}}")],
                TOKENS_PER_S,
                width=6,
                stacked=True,
            ),
            Panel(
                "Tokens generated",
                "By each server, for all clients.",
                [(rate("llamacpp:tokens_predicted_total", "backend", CHOSEN), "{{backend}}")],
                TOKENS_PER_S,
                width=6,
                stacked=True,
            ),
        ],
    },
)
