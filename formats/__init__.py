"""Bytes on disk; nothing here knows models or code.

- ``errors``: the base of all error types, ``GGUFError``, ``ArtifactError``
- ``ggml_types``: block types by name and id, bytes of rows and tensors
- ``gguf_values``, ``gguf_header``, ``gguf_checks``, ``gguf_reader``: value types, bounded parser, rules of the keys, ``GGUFFile``
- ``gguf_writer``: ``GGUFWriter``, streaming
- ``quants``: ``dequantize``, ``quantize``, ``codes``
- ``activations``, ``hadamard``: how products round their activations, and the transform of stored keys
- ``artifact``, ``cuda``, ``abi``: the manifest of an artifact, its GPU code, and the memory shared with native code
- ``cpustate``: what the system tells about its CPU, and grants
"""
