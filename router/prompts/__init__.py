"""Turn prompts into exact tokens: templates, tokenizers, message boundaries.

Knows no slots and no plans.
"""
