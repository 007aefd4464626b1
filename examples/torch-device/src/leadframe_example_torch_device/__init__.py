"""Example: a torch device as a Leadframe platform."""
