"""Bytes on disk: GGUF container, ggml block types, artifact manifest, native ABI."""
