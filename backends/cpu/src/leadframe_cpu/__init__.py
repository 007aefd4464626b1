"""Leadframe on the host processor, through torch."""
