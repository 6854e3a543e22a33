"""Declared operators, one family per file."""
