"""All passes by name, and the pipelines."""

from __future__ import annotations

from ggufc.passes.base import Pass
from ggufc.passes.cache_fixups import CacheFixups
from ggufc.passes.canonicalize import Canonicalize
from ggufc.passes.cse import Cse
from ggufc.passes.dce import Dce
from ggufc.passes.fuse_attention import FuseAttention
from ggufc.passes.fuse_glu import FuseGlu
from ggufc.passes.fuse_hyper_connections import FuseHyperConnections
from ggufc.passes.fuse_indexer_topk import FuseIndexerTopk
from ggufc.passes.fuse_norm import FuseNorm
from ggufc.passes.fuse_rope import FuseRope
from ggufc.passes.fuse_routing import FuseRouting
from ggufc.passes.fuse_sparse_attention import FuseSparseAttention
from ggufc.passes.fuse_sum_rows_ext import FuseSumRowsExt
from ggufc.passes.hoist import Hoist
from ggufc.passes.memory_plan import MemoryPlan
from ggufc.passes.merge_gate_up import MergeGateUp
from ggufc.passes.merge_qkv import MergeQkv
from ggufc.passes.node_budget import NodeBudget
from ggufc.passes.reuse_key import ReuseKey
from ggufc.passes.split_heads import SplitHeads

REGISTRY: dict[str, type[Pass]] = {
    kind.name: kind
    for kind in (
        Canonicalize,
        Cse,
        Dce,
        FuseNorm,
        FuseGlu,
        FuseSumRowsExt,
        FuseHyperConnections,
        FuseRouting,
        FuseIndexerTopk,
        FuseSparseAttention,
        FuseAttention,
        FuseRope,
        MergeQkv,
        MergeGateUp,
        SplitHeads,
        Hoist,
        CacheFixups,
        ReuseKey,
        NodeBudget,
        MemoryPlan,
    )
}
"""Every pass by the name it has in pipelines."""

FUSIONS = (
    "canonicalize,cse,fuse-norm,fuse-glu,fuse-sum-rows-ext,fuse-hyper-connections,fuse-routing,fuse-indexer-topk,fuse-sparse-attention,"
    "fuse-attention,fuse-rope,merge-qkv,merge-gate-up,hoist,cse,dce"
)
"""The rewrites of the default pipeline."""

ANALYSES = "cache-fixups,reuse-key,node-budget,memory-plan"
"""The analyses, in the order of the default pipeline."""

DEFAULT_PIPELINE = f"{FUSIONS},{ANALYSES}"
"""What ``ggufc compile`` runs."""
