"""Leadframe's platform package."""
