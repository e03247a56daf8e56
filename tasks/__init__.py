"""Prefect tasks: one verb each, a few lines over plain functions; small references in and out."""
