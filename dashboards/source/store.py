"""The dashboard of snapshots: limits, disk, saves, restores, rewriting, failures."""

from dashboards.source.panels import Dashboard, Kind, Panel, share_gauge
from dashboards.source.queries import quantile, rate

STORE = Dashboard(
    "kvferry-store",
    "kvferry: store",
    "Snapshots, their limits, the disk, saves, restores, rewriting and failures.",
    {
        "Limits": [
            share_gauge(
                "Bytes of store.max_bytes",
                "1 is normal: the least useful snapshots are evicted. 0 without a limit.",
                [
                    (
                        "sum(kvferry_snapshot_bytes)"
                        " / sum(kvferry_snapshot_bytes_limit) or vector(0)",
                        "bytes",
                    )
                ],
                levels={0.9: "orange"},
            ),
            share_gauge(
                "Tokens of store.max_tokens",
                "1 is normal: the least useful snapshots are evicted. 0 without a limit.",
                [
                    (
                        "sum(kvferry_snapshot_tokens)"
                        " / sum(kvferry_snapshot_tokens_limit) or vector(0)",
                        "tokens",
                    )
                ],
                levels={0.9: "orange"},
            ),
            share_gauge(
                "Disk in use",
                "The file system of each kv_dir, with the files of all programs. At 1: saves fail.",
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
                "Bytes of all snapshots and of the protected ones, the limit, and the free disk.",
                [
                    ("sum(kvferry_snapshot_bytes)", "snapshots"),
                    ("sum(kvferry_snapshot_protected_bytes)", "protected"),
                    ("sum(kvferry_snapshot_bytes_limit)", "limit"),
                    ("kvferry_kv_dir_free_bytes", "left in {{kv_dir}}"),
                ],
                "bytes",
                width=12,
            ),
            Panel(
                "Tokens",
                "Tokens of the snapshots, and their limit.",
                [
                    ("sum(kvferry_snapshot_tokens)", "snapshots"),
                    ("sum(kvferry_snapshot_tokens_limit)", "limit"),
                ],
                width=12,
            ),
        ],
        "Blobs": [
            Panel(
                "Shared bytes",
                "Split snapshots as files of their own, the blobs they are, and whole files.",
                [
                    ("sum(kvferry_blob_sum_bytes)", "as files"),
                    ("sum(kvferry_blob_bytes)", "as blobs"),
                    ("sum(kvferry_whole_file_bytes)", "whole files"),
                ],
                "bytes",
            ),
            Panel(
                "Written",
                "State files that were split, what was written for them, and what is left of "
                "store.max_written_per_day.",
                [
                    (rate("kvferry_blob_split_bytes_total"), "state files"),
                    (rate("kvferry_blob_written_bytes_total"), "written"),
                    ("sum(kvferry_blob_write_budget_bytes) < +Inf", "left of a day"),
                ],
                "Bps",
            ),
            Panel(
                "Written in 24 hours",
                "By kvferry and llama-server to disks, and what part of it were new tokens.",
                [
                    ("sum(kvferry_written_day_bytes)", "written"),
                    ("sum(kvferry_new_day_bytes)", "new tokens"),
                ],
                "bytes",
            ),
            Panel(
                "Blobs and files",
                "Blobs on disk, and state files that are not split yet.",
                [
                    ("sum(kvferry_blobs)", "blobs"),
                    ("sum(kvferry_unwritten_files)", "not split yet"),
                ],
            ),
            Panel(
                "Trouble",
                "Writes that were put off, and damaged blobs: the log says why.",
                [
                    (rate("kvferry_blob_writes_put_off_total"), "put off"),
                    (rate("kvferry_blobs_damaged_total"), "damaged"),
                ],
                "ops",
            ),
        ],
        "Cold tier": [
            Panel(
                "States there",
                "States of all hosts in the cold tier, and snapshots that wait to be copied.",
                [
                    ("max(kvferry_cold_states)", "states"),
                    ("sum(kvferry_cold_waiting)", "waiting"),
                    ("sum(kvferry_cold_copied_total)", "copied by these hosts"),
                ],
            ),
            Panel(
                "Bytes there",
                "State files of all states there, as if each was one of its own.",
                [("max(kvferry_cold_state_bytes)", "state files")],
                "bytes",
            ),
            Panel(
                "Written and fetched",
                "Blobs that were there already are not written again.",
                [
                    (rate("kvferry_cold_written_bytes_total"), "written"),
                    (rate("kvferry_cold_skipped_bytes_total"), "there already"),
                    (rate("kvferry_cold_fetched_bytes_total"), "fetched"),
                ],
                "Bps",
            ),
            Panel(
                "Answers, and objects that were not good",
                "up: the tier answers. Damaged and missing objects are misses.",
                [
                    ("min(kvferry_cold_up)", "up"),
                    (rate("kvferry_cold_damaged_total"), "damaged"),
                    (rate("kvferry_cold_missing_total"), "missing"),
                ],
            ),
        ],
        "Saves and restores": [
            Panel(
                "Saves, by reason",
                "displaced: a request needed the slot and waited for the save. Many: lower "
                "store.idle_save_after.",
                [(rate("kvferry_save_seconds_count", "reason"), "{{reason}}")],
                "ops",
                stacked=True,
            ),
            Panel(
                "Restores and rewriting",
                "Many restream: start the servers of one model with the same -np and -kvu.",
                [
                    (rate("kvferry_restore_seconds_count"), "restore"),
                    (rate("kvferry_rewrite_seconds_count", "what"), "{{what}}"),
                ],
                "ops",
            ),
            Panel(
                "Evictions",
                "As fast as saves: the store is too small for the snapshots in use.",
                [(rate("kvferry_snapshots_evicted_total"), "evicted")],
                "ops",
            ),
            Panel(
                "Time of a save, 95 %",
                "All streams of the backend stand still during a save. Rises: the disk is slow.",
                [(quantile(0.95, "kvferry_save_seconds", "reason"), "{{reason}}")],
                "s",
            ),
            Panel(
                "Time of a restore, 95 %",
                "All streams stand still during a restore. A cold page cache shows here first.",
                [(quantile(0.95, "kvferry_restore_seconds"), "restore")],
                "s",
            ),
            Panel(
                "Time of a rewrite, 95 %",
                "Time of the router and the disk; no backend takes part.",
                [(quantile(0.95, "kvferry_rewrite_seconds", "what"), "{{what}}")],
                "s",
            ),
            Panel(
                "Bytes rewritten",
                "cut: spares the backends larger restores. restream: the cost of servers with "
                "different KV streams.",
                [(rate("kvferry_rewritten_bytes_total", "what"), "{{what}}")],
                "Bps",
                width=12,
            ),
            Panel(
                "Failures",
                "Any: the log says why. The prompt is computed instead; after a failed erase the "
                "request gets 503.",
                [(rate("kvferry_kv_failures_total", "action"), "{{action}}")],
                "ops",
                width=12,
                levels={0.001: "red"},
            ),
        ],
    },
)
