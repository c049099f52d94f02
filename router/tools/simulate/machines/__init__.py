"""Simulated hosts: servers, what they cost, what they store, and what goes between them."""
