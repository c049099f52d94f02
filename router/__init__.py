"""kvferry: a reverse proxy that moves KV state files between llama-server slots.

Packages, from the inside out (`docs/architecture.md` is the map):

- `base`: types, errors, tokens and ports that every other package uses
- `core`: decisions, pure: events in, effects out
- `engine`: carries the effects of the core out
- `llama`, `prompts`, `store`: llama-server's HTTP, prompts as tokens, state files
- `telemetry`: metrics, traces, log lines, the decision log
- `web`: clients and operators over HTTP
- `config`: the YAML file
- `assembly`: builds a running router out of all these
- `tools`: the command line and its commands
"""

__version__ = "0.1.0"
