"""Interleaved weight layouts, one block type per class."""
