"""Fused graphs to native code.

Map, in the order data flows: ``options`` of a compilation and its report; ``compile`` starts the process ``child``; ``frontend`` from a
file to schedules; ``lower`` chooses launches (``lower_fusions``, ``lower_experts``, ``lower_hyper``, ``lower_routing``, ``lower_conv`` and
``lower_pointwise`` several nodes as one; ``lower_generic``, ``lower_sparse`` and ``lower_stacked`` one rule per operator;
``lower_operands`` what they share, ``lower_attributes`` what kernels know, ``keep`` intermediate results as outputs); ``weight_plan`` which
weights are stored and how; ``schedule`` launches before they have addresses; ``kernels/`` and ``weights/`` emit code through ``emitter``
(with ``emitter_arithmetic`` and ``emitter_dot``);
``kernel_build`` specifications to one image, by ``cpu/``; ``llvm_passes`` what LLVM does for both targets; ``nvptx/`` the same kernels
for GPUs; ``manifest`` and ``artifact_writer`` the file.
"""
