"""Prefect flows and the command line; the environment that every process of the project needs is set here."""
