"""Leadframe's scheduler package."""
