"""The page that comes with the service: a playground, experiments, and the engine at work."""
