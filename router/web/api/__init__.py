"""Clients' routes: keys, which backends can serve a request, and completions end to end."""
