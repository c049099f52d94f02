"""What clients wait for, how well that is foreseen, and what the router itself adds."""

from dashboards.source.panels import Dashboard, Kind, Panel
from dashboards.source.queries import PER_S, SHARE, THE_ROUTERS, TOKENS_PER_S, quantile, rate

LATENCY = Dashboard(
    "kvferry-latency",
    "kvferry: latency",
    "What clients wait for, how well that is foreseen, and what the router itself adds.",
    {
        "First token": [
            Panel(
                "Time to the first byte, median",
                "By where the prefix came from: snapshot should be far below cold.",
                [(quantile(0.5, "kvferry_ttft_seconds", "source"), "{{source}}")],
                "s",
            ),
            Panel(
                "Time to the first byte, 95 %",
                "By where the prefix came from.",
                [(quantile(0.95, "kvferry_ttft_seconds", "source"), "{{source}}")],
                "s",
            ),
            Panel(
                "Time to the first byte, all",
                "Requests by their time.",
                [
                    (
                        "sum by (le) (increase(kvferry_ttft_seconds_bucket[$__rate_interval]))",
                        "{{le}}",
                    )
                ],
                kind=Kind.HEATMAP,
            ),
        ],
        "Queue": [
            Panel(
                "Waiting now",
                "Near queue.max_requests: clients are about to get 503.",
                [("sum(kvferry_queue_depth)", "waiting")],
            ),
            Panel(
                "Time in the queue",
                "Grows: all slots are busy; add slots or a backend.",
                [
                    (quantile(0.5, "kvferry_queue_wait_seconds"), "median"),
                    (quantile(0.95, "kvferry_queue_wait_seconds"), "95 %"),
                ],
                "s",
            ),
            Panel(
                "How requests end",
                "refused: the backend's own answer. What the router turned away: queue_full, "
                "deadline, no_backend.",
                [(rate("kvferry_requests_total", "outcome"), "{{outcome}}")],
                "reqps",
                stacked=True,
            ),
        ],
        "Predictions": [
            Panel(
                "Distance of prediction and measurement",
                "Of the time to the first byte. Large for long: somebody else uses the servers.",
                [
                    (quantile(0.5, "kvferry_ttft_prediction_error_seconds"), "median"),
                    (quantile(0.95, "kvferry_ttft_prediction_error_seconds"), "95 %"),
                ],
                "s",
            ),
            Panel(
                "Predicted over measured",
                "1 is right; far above or below for one source: its choices have a wrong price.",
                [
                    (
                        f"{rate('kvferry_ttft_predicted_seconds_total', 'source')}"
                        f" / {rate('kvferry_ttft_seconds_sum', 'source')}",
                        "{{source}}",
                    )
                ],
            ),
            Panel(
                "Generated tokens",
                "Throughput, as the backends reported it.",
                [(rate("kvferry_generated_tokens_total"), "generated")],
                TOKENS_PER_S,
            ),
        ],
        "The router": [
            Panel(
                "Event loop lag",
                "Every stream is late by as much. Above 0.1 s: more to do than one process can.",
                [
                    (quantile(0.5, "kvferry_event_loop_lag_seconds"), "median"),
                    (quantile(0.99, "kvferry_event_loop_lag_seconds"), "99 %"),
                ],
                "s",
                width=6,
                levels={0.1: "red"},
            ),
            Panel(
                "CPU",
                "Share of one core: it has only one to use.",
                [(f"rate(process_cpu_seconds_total{PER_S}) {THE_ROUTERS}", "{{instance}}")],
                SHARE,
                width=6,
                levels={0.8: "red"},
            ),
            Panel(
                "Memory",
                "Grows with snapshots and with what is in flight, and not without end.",
                [(f"process_resident_memory_bytes {THE_ROUTERS}", "{{instance}}")],
                "bytes",
                width=6,
            ),
            Panel(
                "Version",
                "What runs.",
                [("kvferry_build_info", "")],
                kind=Kind.TABLE,
                width=6,
            ),
        ],
    },
)
