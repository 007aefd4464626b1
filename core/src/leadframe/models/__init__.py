"""Leadframe's models package."""
