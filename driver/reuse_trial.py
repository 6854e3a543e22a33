"""How often an artifact's bound graphs can run again: a short life of a session, with everything in it that ends a binding.

Sizes never do: tokens, outputs, cells and positions are parameters and inputs. ``Statistics`` names what does.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ggufc.runtime import Artifact, Session

_UBATCH, _STEPS = 4, 8


def reuse_trial(artifact: Artifact) -> list[str]:
    """Lines of ``Statistics.reuse_lines`` after a prompt of three micro-batches, decoding, a change between token and embedding input, a
    shift of positions and a restored state, as far as the model allows each.

    Raises ``GgufcError`` where the artifact cannot run on this machine.
    """
    from ggufc.runtime import RuntimeRefusal, Session

    tokens = np.random.default_rng(1).integers(0, artifact.manifest.n_vocab, 3 * _UBATCH + 4 * _STEPS, dtype=np.int32).tolist()
    with Session(artifact, n_ctx=256, n_ubatch=_UBATCH, n_threads=1) as session:
        session.decode(tokens[: 3 * _UBATCH])
        _steps(session, tokens[-_STEPS:])
        if "eval_embd" in artifact.program_names:
            session.decode(embd=np.zeros((1, artifact.manifest.n_embd), np.float32))
            _steps(session, tokens[-2 * _STEPS : -_STEPS])
        try:
            session.seq_add(0, 0, -1, 1)
        except RuntimeRefusal:
            pass  # keys of this model cannot be turned
        else:
            _steps(session, tokens[-3 * _STEPS : -2 * _STEPS])
        state = io.BytesIO()
        session.state_save(state, 0)
        session.state_load(state.getvalue(), 0)
        _steps(session, tokens[-4 * _STEPS : -3 * _STEPS])
        return session.stats.reuse_lines()


def _steps(session: Session, tokens: list[int]) -> None:
    for token in tokens:
        session.decode_view([token])
