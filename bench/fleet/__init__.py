"""The same clients in front of the same llama-servers, with one router after the other between."""
