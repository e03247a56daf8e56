"""The run's specification, the transformer, its optimizer, schedules and the one step function."""
