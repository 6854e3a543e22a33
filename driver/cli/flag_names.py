"""Messages name options as Python does; the command line's reader knows them as flags."""

from __future__ import annotations

import re

_BUILDER = {
    "type_k": "-ctk",
    "type_v": "-ctv",
    "type_k_first": "-ctk-first",
    "type_k_last": "-ctk-last",
    "type_v_first": "-ctv-first",
    "type_v_last": "-ctv-last",
    "k_hadamard": "-khad",
    "v_hadamard": "-vhad",
    "flash_attn": "-fa",
    "mla": "--mla",
    "idx_type_k": "-ctik",
    "dsa": "--dsa",
    "dsa_top_k": "--dsa-top-k",
    "fidx": "-fidx",
}
_SESSION = {
    "n_ctx": "-c",
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "n_threads": "-t",
    "defrag_threshold": "--defrag-thold",
    "compact_windows": "--compact-windows",
}
_NAMED = re.compile(r"builder option '(\w+)'|\b(" + "|".join(_SESSION) + r")\b(?! \(-)")


def with_flags(message: str) -> str:
    """``message`` with the flag in place of a builder option, and behind the first mention of a session's option."""
    seen: set[str] = set()

    def flag(match: re.Match[str]) -> str:
        builder, session = match.groups()
        if builder:
            return _BUILDER.get(builder, match[0])
        if session in seen:
            return session
        seen.add(session)
        return f"{session} ({_SESSION[session]})"

    return _NAMED.sub(flag, message)
