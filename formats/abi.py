"""Layout of the memory shared by the runtime and the generated driver functions.

Every field is one 64-bit word; numbers are word offsets. The pool and the counters keep hot words on cache lines of their own.
"""

from __future__ import annotations

ABI_VERSION = 2
RUNNABLE_ABIS = (1, 2)
"""Version 1 takes its tiles from one claim word per launch, in front of the counters; it needs nothing that version 2 lacks."""

COMMON = ("T", "O", "C", "KV", "R")
"""Symbols every evaluation graph has."""

PARAMS = (*COMMON, "S", "C4", "E4", "V4", "W4", "C128", "E128", "V128", "W128")
"""Symbols of an evaluation graph in the order of the kernel's ``params`` array (docs/runtime-inputs.md)."""

# Pool: one per thread team.
POOL_EPOCH = 0  # number of evaluations published so far; workers sleep (futex) on its low 32 bits
POOL_EXEC = 16  # address of the current exec record
POOL_SLEEPERS = 32  # workers inside futex wait
POOL_STOP = 48  # non-zero: workers return
POOL_SCRATCH = 64  # base address of scratch memory
POOL_SCRATCH_STRIDE = 65  # bytes of scratch per thread
POOL_THREADS = 66  # threads of the team, the caller included
POOL_WORDS = 80

# Exec: one per bound graph.
EXEC_N_LAUNCHES = 0
EXEC_LAUNCHES = 1  # address of the launch table
EXEC_PARAMS = 2  # address of the params array
EXEC_COUNTERS = 3  # address of the counters
EXEC_PROFILE = 4  # 0, or address of 2 n_launches + 1 words: thread 0's cycle counter before and after each launch's wait, and at the end
EXEC_TILES = 5  # address of one word per launch: epoch << 32 | tiles
EXEC_CLAIMS = 6  # address of the claim words: [thread][launch], CLAIM_WORDS each
EXEC_WORDS = 8

# Launch table entry.
LAUNCH_FN = 0
LAUNCH_ARGS = 1
LAUNCH_SYM = 2  # index into params, or -1 for "one"
LAUNCH_DIV = 3
LAUNCH_MULT = 4  # tiles = mult * ceil(params[sym] / div)
LAUNCH_WAIT = 5  # launches [wait, own index) must be complete before this one starts; own index = no wait
LAUNCH_WORDS = 8

# Counters, per launch: the done word is epoch << 32 | tiles done.
COUNTER_DONE = 16
COUNTER_WORDS = 32

# Claim words, per thread and launch: epoch << 32 | tiles left of the thread's share; a word of an earlier epoch is a whole share.
CLAIM_WORDS = 8
