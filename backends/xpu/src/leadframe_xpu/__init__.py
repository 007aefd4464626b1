"""Leadframe on Intel GPUs, through IPEX and its successors."""
