"""Kernels, one operator family per file.

``base`` what a kernel is. Products: ``matmul`` (over ``matmul_int8`` and ``matmul_float``), ``matmul_id`` with chosen experts,
``strided_matmul`` of views; ``quantize`` rounds their activations. Attention: ``attention_cpu`` over ``attention_rows``,
``attention_steps`` and ``attention_cells``. Caches: ``cache``, ``cache_blocks`` and ``decode``. Rows: ``rowwise`` norms, ``rope``,
``softmax``, ``sums``, ``select``, ``get_rows``, ``hadamard``, ``convolution``. Sparse attention: ``indexer``, ``lists``. Anything strided:
``elementwise`` over ``strided``. ``vmath`` elementary functions.
"""
