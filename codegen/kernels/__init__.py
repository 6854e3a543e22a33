"""Kernels, one operator family per file."""
