"""Random surroundings: `python -m property_tests.random_surroundings --count 1000`, or one: `--seed 12`.

Prints each step that is wrong or raw, then how often each verdict and each refusal came. Fails where one was so.
"""

from __future__ import annotations

from property_tests.random_surroundings.judge import describe, judge
from property_tests.seeds import run_seeds

if __name__ == "__main__":
    raise SystemExit(run_seeds("random_surroundings", __doc__, judge, describe))
