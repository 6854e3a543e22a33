"""Graph rewrites and analyses.

``base`` what a pass is; ``manager`` pipelines as text; ``rules`` patterns and the worklist; ``pipelines`` all passes by name; one file per
pass: ``canonicalize``, ``cse``, ``dce``, ``fuse_norm``, ``fuse_glu``, ``fuse_sum_rows_ext``, ``fuse_indexer_topk``, ``fuse_attention``,
``fuse_sparse_attention``, ``fuse_hyper_connections``, ``fuse_routing``, ``fuse_rope``, ``merge_qkv`` and ``merge_gate_up`` (over
``merge_products``), ``split_heads``, ``hoist``; the analyses ``cache_fixups``, ``reuse_key``, ``node_budget``, ``memory_plan`` (over
``memory_planner``); ``fusion_counts`` the two-way baseline; ``opt`` text to text. ``docs/passes.md`` shows each pass at work.
"""

from ggufc.passes.base import Pass, PassResult, RulePass
from ggufc.passes.errors import PassError
from ggufc.passes.fusion_counts import compare_counts, fusion_counts
from ggufc.passes.manager import PassManager, PassRecord, format_records
from ggufc.passes.opt import opt
from ggufc.passes.pipelines import ANALYSES, DEFAULT_PIPELINE, FUSIONS, REGISTRY

__all__ = [
    "ANALYSES",
    "DEFAULT_PIPELINE",
    "FUSIONS",
    "REGISTRY",
    "Pass",
    "PassError",
    "PassManager",
    "PassRecord",
    "PassResult",
    "RulePass",
    "compare_counts",
    "format_records",
    "fusion_counts",
    "opt",
]
