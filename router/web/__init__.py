"""The HTTP surface that clients and operators see."""
