"""The llama-server state file (GGSQ): bytes in, facts out. Knows nothing of slots or HTTP."""
