"""Connections, limits, TLS, framing, and the copying of a response. Knows no routes."""
