"""The engine room: messages, sequences, scheduling, verification and the step loop."""
