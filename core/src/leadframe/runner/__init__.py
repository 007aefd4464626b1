"""Leadframe's runner package."""
