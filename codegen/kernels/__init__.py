"""Kernels, one operator family per file.

``base`` what a kernel is. Products: ``matmul``, ``matmul_id`` with chosen experts (both over ``matmul_product`` and ``matmul_tokens``;
forms ``matmul_int8``, ``matmul_amx`` on ``tiles``, ``matmul_float``, ``matmul_bf16``), ``strided_matmul`` of views; ``quantize`` rounds
their activations; ``routing`` chooses experts. Attention: ``attention_cpu`` over ``attention_rows`` and
``attention_results``; it calls ``attention_walk``, a function over ``attention_steps``, ``attention_scores`` and ``attention_cells``, which
all kernels over rows of a shape share; ``attention_alone`` for lone tokens; ``attention_blocks``, ``attention_rounded`` and
``attention_weights`` for caches of block types; ``attention_sparse`` over rows of two kinds. Caches: ``cache``, ``cache_blocks`` and
``decode``. Rows: ``rowwise`` norms, ``rope``, ``softmax``, ``sums``, ``select``, ``get_rows``, ``hadamard``, ``convolution``, ``hyper``
connections. Sparse attention: ``indexer``, ``lists``. Anything strided: ``elementwise`` over ``strided``. ``vmath`` elementary functions.
"""
