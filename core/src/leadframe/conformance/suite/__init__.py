"""What pytest collects."""
