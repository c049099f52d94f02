"""Prompts as exact tokens: templates, tokenizers, message boundaries.

Knows no slots and no plans.
"""
