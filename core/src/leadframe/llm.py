"""Offline generation."""
