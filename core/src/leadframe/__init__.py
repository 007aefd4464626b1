"""Leadframe serves language models on any accelerator through one narrow platform interface."""

from __future__ import annotations

__version__ = "0.1.0"
