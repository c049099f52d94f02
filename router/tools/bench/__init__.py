"""`kvferry bench`: how fast one's own llama-servers compute, save and restore prompts.

Measures in an idle slot of each server, puts the slot's content back, and starts no server.
"""
