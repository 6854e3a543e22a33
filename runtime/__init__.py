"""Artifacts, execution, caches, tokenizers and sessions."""
