"""Leadframe's server package."""
