"""The tests run under the project's own environment, set before anything imports Numba, torch or Prefect."""

import flows  # noqa: F401  (importing it applies the environment)
