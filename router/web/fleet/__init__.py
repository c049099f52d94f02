"""The other hosts of a fleet: where a request goes, what they are told, and states that travel."""
