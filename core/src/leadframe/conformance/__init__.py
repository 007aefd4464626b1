"""Leadframe's conformance package."""
