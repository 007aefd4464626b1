"""Leadframe's cli package."""
