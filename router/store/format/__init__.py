"""Read the bytes of llama-server's state files, and rewrite them for another slot layout.

Pure: knows no paths. Format: docs/llama-server.md, section 1.4.
"""
