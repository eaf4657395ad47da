"""The asyncio room: settings, HTTP and WebSocket handlers, text, and the client of the engine."""
