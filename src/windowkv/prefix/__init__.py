"""Prefixes that several prompts share, computed once."""
