"""Bodies of other APIs: as chats of llama-server, and what they say about caching."""
