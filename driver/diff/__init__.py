"""Comparing two evaluations of the same steps, node by node (``ggufc diff``).

``sides``        what can be compared: generated code, the reference interpreter, tensors stored by any engine
``interpreter``  an executor that evaluates graphs in numpy, so that a ``Session`` can drive it
``recording``    the values of one micro-batch by node
``compare``      how far two arrays are apart, and how far they may be
``walk``         the steps of a case on both sides in lockstep, and what differs
``words``        sides from what a user writes
``stored``       tensors in .npz files and folders, and names of other engines
``report``       tables for people, JSON for programs
"""

from ggufc.diff.compare import Tolerances
from ggufc.diff.sides import CodeSide, InterpreterSide, StoredSide
from ggufc.diff.walk import Report, compare_sides

__all__ = ["CodeSide", "InterpreterSide", "Report", "StoredSide", "Tolerances", "compare_sides"]
