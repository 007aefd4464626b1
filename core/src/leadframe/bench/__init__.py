"""Leadframe's bench package."""
