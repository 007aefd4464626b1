"""Example: one kernel for someone else's Leadframe platform."""
