"""Snapshots as manifests and blobs: bytes that several state files have are stored once.

Everything but `tier` blocks: call it in a thread.
"""
