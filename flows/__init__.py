"""Prefect flows and the command line. Importing this package sets the environment its processes run under."""

from flows import environment

environment.apply()
