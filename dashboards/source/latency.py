"""The dashboard of latency: first byte, queue, predictions, the router's process."""

from dashboards.source.panels import Dashboard, Kind, Panel
from dashboards.source.queries import PER_S, SHARE, THE_ROUTERS, TOKENS_PER_S, quantile, rate

LATENCY = Dashboard(
    "kvferry-latency",
    "kvferry: latency",
    "Time to the first byte, queue, predictions, and the router's own process.",
    {
        "First byte": [
            Panel(
                "Time to the first byte, median",
                "By the planned source of the prefix: snapshot should be far below cold.",
                [(quantile(0.5, "kvferry_ttft_seconds", "source"), "{{source}}")],
                "s",
            ),
            Panel(
                "Time to the first byte, 95 %",
                "By the planned source of the prefix.",
                [(quantile(0.95, "kvferry_ttft_seconds", "source"), "{{source}}")],
                "s",
            ),
            Panel(
                "Time to the first byte, all",
                "Number of requests for each time.",
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
                "Requests in the queue. Near queue.max_requests: clients are about to get 503.",
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
                "Requests, by outcome",
                "refused: the backend answered with an error. queue_full, deadline, no_backend: "
                "the router rejected the request.",
                [(rate("kvferry_requests_total", "outcome"), "{{outcome}}")],
                "reqps",
                stacked=True,
            ),
        ],
        "Predictions": [
            Panel(
                "Prediction error",
                "Predicted against measured time to the first byte. Large for long: other clients "
                "use the servers directly.",
                [
                    (quantile(0.5, "kvferry_ttft_prediction_error_seconds"), "median"),
                    (quantile(0.95, "kvferry_ttft_prediction_error_seconds"), "95 %"),
                ],
                "s",
            ),
            Panel(
                "Predicted over measured",
                "1 is right. Far from 1 for one source only: its candidates have a wrong price.",
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
                "Throughput, as reported by the backends.",
                [(rate("kvferry_generated_tokens_total"), "generated")],
                TOKENS_PER_S,
            ),
        ],
        "The router": [
            Panel(
                "Event loop lag",
                "Every stream is late by as much. Above 0.1 s: one process has too much to do.",
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
                "Share of one core; the router can use only one.",
                [(f"rate(process_cpu_seconds_total{PER_S}) {THE_ROUTERS}", "{{instance}}")],
                SHARE,
                width=6,
                levels={0.8: "red"},
            ),
            Panel(
                "Memory",
                "Grows with snapshots and requests in flight, but only up to a limit.",
                [(f"process_resident_memory_bytes {THE_ROUTERS}", "{{instance}}")],
                "bytes",
                width=6,
            ),
            Panel(
                "Version",
                "The running versions.",
                [("kvferry_build_info", "")],
                kind=Kind.TABLE,
                width=6,
            ),
            Panel(
                "Bugs",
                "Tasks, loops and requests that met an unexpected exception. The log has each one.",
                [(f"increase(kvferry_task_failures_total{PER_S})", "{{task}}")],
                width=6,
                levels={1: "red"},
            ),
        ],
    },
)
