"""GPU code: the kernels of a schedule as PTX, through LLVM's NVPTX back end.

``target`` architectures; ``emitter`` the shared emitter with threads for lanes; ``entry`` a PTX function and its geometry; ``products``
(``product_tiles`` many tokens and integer weights, ``product_halves`` F16 and BF16), ``rows``, ``attention``, ``choosing`` and
``indexing`` (both over ``ranking``) the forms that differ from the CPU's; ``forms`` the table of all forms and ``emit_ptx``; ``ptx`` LLVM
modules to text; ``assembler`` and ``occupancy`` what ``ptxas`` says of them; ``roofline`` what a schedule should take.
"""

from ggufc.codegen.nvptx.forms import describe, emit_all, emit_ptx, form_of, manifest
from ggufc.codegen.nvptx.target import PTX_VERSIONS, PtxTarget, resolve, split

__all__ = ["PTX_VERSIONS", "PtxTarget", "describe", "emit_all", "emit_ptx", "form_of", "manifest", "resolve", "split"]
