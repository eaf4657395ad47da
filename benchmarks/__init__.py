"""Measurements: forerun side by side with other systems, over its real HTTP service."""
