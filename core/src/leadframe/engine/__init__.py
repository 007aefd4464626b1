"""Leadframe's engine package."""
