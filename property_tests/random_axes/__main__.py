"""Random models on axes: `python -m property_tests.random_axes --count 2000`, or one: `--seed 12`.

Prints each model that is wrong or raw, then how often each verdict and each refusal came. Fails where one was so.
"""

from __future__ import annotations

from property_tests.random_axes.judge import draw_case, judge
from property_tests.seeds import run_seeds

if __name__ == "__main__":
    raise SystemExit(run_seeds("random_axes", __doc__, judge, draw_case))
