"""The bytes of llama-server's state files: read, and rewritten for another slot layout.

Pure: knows no paths. Format: docs/llama-server.md, section 1.4.
"""
