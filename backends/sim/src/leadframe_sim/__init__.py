"""A simulated accelerator, and broken ones that prove the conformance kit."""
