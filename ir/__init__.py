"""The graph: types, operators, text, verifier, reference interpreter."""
