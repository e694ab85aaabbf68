"""Testing: laws that every pass and every operation keeps, tried on drawn train steps.

In: a pass or an operation of a user's own. Out: nothing, or an error with the smallest step found that breaks a law, as
a script to run. `fzero.testing.strategies` needs hypothesis, the extra `fzero[testing]`.
"""

from fzero.testing.operations import check_operation
from fzero.testing.passes import check_pass
from fzero.testing.steps import Of, Op, Optimizer, Penalty, TrainStep

__all__ = ["Of", "Op", "Optimizer", "Penalty", "TrainStep", "check_operation", "check_pass"]
