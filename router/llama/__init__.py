"""llama-server's HTTP interface: client, requests and replies in all dialects.

Knows bytes and JSON, not slots' owners or plans. Facts are cited from docs/llama-server.md.
"""
