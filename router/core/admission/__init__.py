"""Which queued request is served next and how; backends that are attached, drained and lost."""
