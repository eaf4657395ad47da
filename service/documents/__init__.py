"""The documents that the service itself shows, under /docs."""
