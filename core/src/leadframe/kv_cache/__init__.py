"""Leadframe's kv_cache package."""
