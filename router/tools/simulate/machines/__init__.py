"""Simulated servers, and what they cost."""
