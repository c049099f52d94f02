"""The configuration: what the YAML may say, where a mistake is, what differs between two files.

Knows the names of the policies, and nothing else of a running router.
"""
