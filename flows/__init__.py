"""Prefect flows and the command line. Importing this package sets the environment its processes run under."""

import os

from flows import environment
from tasks import leash

environment.apply()
if "PREFECT__FLOW_RUN_ID" in os.environ:  # a worker started this process for one run
    leash.vanish_with_parent()
