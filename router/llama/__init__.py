"""llama-server's HTTP interface: client, requests and replies in all dialects.

Handles bytes and JSON; knows no plans and no job of a slot. Facts cite docs/llama-server.md.
"""
