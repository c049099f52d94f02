"""Snapshots, their limits, and what is done with them."""

from dashboards.source.panels import Dashboard, Kind, Panel, share_gauge
from dashboards.source.queries import quantile, rate

STORE = Dashboard(
    "kvferry-store",
    "kvferry: store",
    "Snapshots, their limits, the disk under them, and what is done with them.",
    {
        "Limits": [
            share_gauge(
                "Bytes of store.max_bytes",
                "Full is normal: the least useful make room. Without a limit it stays 0.",
                [("sum(kvferry_snapshot_bytes) / sum(kvferry_snapshot_bytes_limit)", "bytes")],
                levels={0.9: "orange"},
            ),
            share_gauge(
                "Tokens of store.max_tokens",
                "The same. Without a limit it stays 0.",
                [("sum(kvferry_snapshot_tokens) / sum(kvferry_snapshot_tokens_limit)", "tokens")],
                levels={0.9: "orange"},
            ),
            share_gauge(
                "Disk in use",
                "The whole file system of each kv_dir, whoever wrote there. Full: saves fail.",
                [("1 - kvferry_kv_dir_free_bytes / kvferry_kv_dir_size_bytes", "{{kv_dir}}")],
                levels={0.9: "orange", 0.95: "red"},
            ),
            Panel(
                "Snapshots",
                "Zero under load: no backend can save; /kvferry/state shows the problem of each.",
                [("sum(kvferry_snapshots)", "snapshots")],
                kind=Kind.NUMBER,
                width=6,
                height=6,
                base="red",
                levels={1: "green"},
            ),
            Panel(
                "Size",
                "Snapshots and their limit, and what is left on the disk.",
                [
                    ("sum(kvferry_snapshot_bytes)", "snapshots"),
                    ("sum(kvferry_snapshot_bytes_limit) < +Inf", "limit"),
                    ("kvferry_kv_dir_free_bytes", "left in {{kv_dir}}"),
                ],
                "bytes",
                width=12,
            ),
            Panel(
                "Tokens",
                "Snapshots and their limit.",
                [
                    ("sum(kvferry_snapshot_tokens)", "snapshots"),
                    ("sum(kvferry_snapshot_tokens_limit) < +Inf", "limit"),
                ],
                width=12,
            ),
        ],
        "Saves and restores": [
            Panel(
                "Saves, by reason",
                "displaced: a request needed the slot, and waited for it. Much of it: lower "
                "store.idle_save_after.",
                [(rate("kvferry_save_seconds_count", "reason"), "{{reason}}")],
                "ops",
                stacked=True,
            ),
            Panel(
                "Restores and rewriting",
                "restream: start the servers of one model with the same -np and -kvu.",
                [
                    (rate("kvferry_restore_seconds_count"), "restore"),
                    (rate("kvferry_rewrite_seconds_count", "what"), "{{what}}"),
                ],
                "ops",
            ),
            Panel(
                "Evictions",
                "As fast as saves: the store is too small for what is in use.",
                [(rate("kvferry_snapshots_evicted_total"), "evicted")],
                "ops",
            ),
            Panel(
                "Time of a save, 95 %",
                "All streams of the backend stand still meanwhile. Rises: the disk.",
                [(quantile(0.95, "kvferry_save_seconds", "reason"), "{{reason}}")],
                "s",
            ),
            Panel(
                "Time of a restore, 95 %",
                "The same; a cold page cache shows here first.",
                [(quantile(0.95, "kvferry_restore_seconds"), "restore")],
                "s",
            ),
            Panel(
                "Time of a rewriting, 95 %",
                "The router's and the disk's; no backend takes part.",
                [(quantile(0.95, "kvferry_rewrite_seconds", "what"), "{{what}}")],
                "s",
            ),
            Panel(
                "Bytes rewritten",
                "What cuts spare the backends, and what differing servers cost.",
                [(rate("kvferry_rewritten_bytes_total", "what"), "{{what}}")],
                "Bps",
                width=12,
            ),
            Panel(
                "Failures",
                "Any: the log says why. No request fails for it: it is computed instead.",
                [(rate("kvferry_kv_failures_total", "action"), "{{action}}")],
                "ops",
                width=12,
                levels={0.001: "red"},
            ),
        ],
    },
)
