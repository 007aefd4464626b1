"""Leadframe's metrics package."""
