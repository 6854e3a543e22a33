"""Block quantisation in numpy: ``dequantize`` and ``codes`` for every type, ``quantize`` where it is defined.

``bits`` and ``tables`` hold what types share; ``blocks32``, ``k_types``, ``iq_types`` and ``ik_types`` one decoder per type; ``codes`` the
dispatch over whole tensors; ``dequantize`` and ``quantize`` (with ``quantize_k``) the public conversions.
"""

from ggufc.formats.quants.codes import codes
from ggufc.formats.quants.dequantize import dequantize
from ggufc.formats.quants.quantize import quantize

__all__ = ["codes", "dequantize", "quantize"]
