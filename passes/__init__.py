"""Graph rewrites and analyses."""
