"""The same clients and llama-servers, with one router after the other between them."""
