"""Leadframe's tokenizer package."""
