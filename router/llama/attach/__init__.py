"""Attaching a backend: monitor (up or down), probe, namespace and diagnosis."""
