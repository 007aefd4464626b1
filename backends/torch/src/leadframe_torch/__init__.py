"""What every Leadframe backend on torch arrays shares."""
