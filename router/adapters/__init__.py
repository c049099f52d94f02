"""Everything that touches the outside world: llama-server, the disk, time, telemetry."""
