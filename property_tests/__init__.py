"""Property tests: one strategy and one law a test. A package, because `tests` has files of the same names."""
