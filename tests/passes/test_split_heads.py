"""Which caches are divided by heads, and which cannot be."""

from __future__ import annotations

import pytest

from ggufc.formats.gguf_reader import GGUFFile
from ggufc.models import load_model
from ggufc.models.step import Step
from ggufc.passes import DEFAULT_PIPELINE, PassError, PassManager
from ggufc.passes.split_heads import ANALYSIS, with_split
from support import BUNDLED_GOLDEN


def divided(model: str, choices: list[str], **options: bool | int) -> tuple[dict[str, int], dict[str, int]]:
    """(heads by cache, counts of the pass) of a model's final graph."""
    with GGUFFile.open(BUNDLED_GOLDEN / model / "model.gguf") as file:
        graph = load_model(file).build(Step(options))
    records = PassManager.parse(with_split(DEFAULT_PIPELINE, choices)).run(graph)
    (record,) = [record for record in records if record.name.startswith(ANALYSIS)]
    return graph.analysis.get(ANALYSIS, {}), record.counts


def test_a_layer_with_more_heads_is_divided() -> None:
    assert divided("llama-gqa-tied", ["1:1"]) == ({"blk.1.k": 1, "blk.1.v": 1}, {"divided": 1, "whole": 0})


def test_values_read_column_by_column_are_refused() -> None:  # S4
    """Without fused attention a graph reads values transposed, so no cell's heads lie together."""
    with pytest.raises(PassError, match="values that are read column by column cannot be divided by heads"):
        divided("llama-gqa-tied", ["0-1:1"], flash_attn=False)


def test_too_few_heads_and_latents_are_refused() -> None:
    with pytest.raises(PassError, match="layer 0 after 2 heads: it has 2 KV heads; give fewer, from 1 to 1"):
        divided("llama-gqa-tied", ["0:2"])
    with pytest.raises(PassError, match="share its one KV head, as in latent attention"):
        divided("glm-dsa-topk8", ["0:1"])


@pytest.mark.parametrize("choice", ["7:1", "1-0:1", "0:0", "a:1"])
def test_impossible_choices_are_refused(choice: str) -> None:
    with pytest.raises(PassError, match=r"heads are divided by LAYER:HEADS|split-heads divides layers"):
        divided("llama-gqa-tied", [choice])
