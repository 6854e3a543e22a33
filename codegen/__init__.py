"""Fused graphs to native code."""
