"""SentencePiece-style merging by score (``tokenizer.ggml.model`` = ``llama``).

A merge table cannot express this rule: which pair is joined next depends on the score of the *joined* text, and equal scores go to the
leftmost pair. So the loop is written here: a heap of candidate pairs over a linked list of symbols, O(n log n) in the length of the text.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .errors import RuntimeRefusal
from .vocab import Vocab

SPACE = "\u2581"


class SpmModel:
    """Merges text into token ids. ``encode`` takes text whose special tokens have been cut out already."""

    def __init__(self, vocab: Vocab) -> None:
        if vocab.scores is None:
            raise RuntimeRefusal("the key tokenizer.ggml.scores is missing; a tokenizer of type llama needs the scores of its tokens")
        self._ids = vocab.ids
        self._scores: list[float] = vocab.scores.tolist()
        self._bytes = vocab.byte_ids
        self._unknown = vocab.special_ids.get("unknown", -1)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; characters without a token become byte tokens, or the unknown token where those are missing."""
        symbols: list[str] = list(text.replace(" ", SPACE))
        n = len(symbols)
        ids, scores = self._ids, self._scores
        before = list(range(-1, n - 1))
        after = [*range(1, n), -1] if n else []
        heap: list[tuple[float, int, int, str]] = []
        for i in range(n - 1):
            joined = symbols[i] + symbols[i + 1]
            token = ids.get(joined)
            if token is not None:
                heap.append((-scores[token], i, i + 1, joined))
        heapify(heap)
        while heap:
            _, left, right, joined = heappop(heap)
            # The entry is stale if either side has grown or gone since it was pushed.
            if after[left] != right or len(symbols[left]) + len(symbols[right]) != len(joined) or not symbols[left]:
                continue
            symbols[left], symbols[right] = joined, ""
            follower = after[right]
            after[left] = follower
            if follower >= 0:
                before[follower] = left
                pair = joined + symbols[follower]
                token = ids.get(pair)
                if token is not None:
                    heappush(heap, (-scores[token], left, follower, pair))
            leader = before[left]
            if leader >= 0:
                pair = symbols[leader] + joined
                token = ids.get(pair)
                if token is not None:
                    heappush(heap, (-scores[token], leader, left, pair))
        out: list[int] = []
        for symbol in symbols:
            if not symbol:
                continue
            token = ids.get(symbol)
            if token is not None:
                out.append(token)
            else:
                out.extend(self._spell(symbol))
        return out

    def _spell(self, symbol: str) -> list[int]:
        spelled = [self._bytes[b] for b in symbol.encode("utf-8", "surrogatepass")]
        if min(spelled) >= 0:
            return spelled
        return [self._unknown] if self._unknown >= 0 else []
