"""The platform `scratch` for Leadframe."""
