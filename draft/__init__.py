"""Proposers: everything that guesses the target's next tokens."""
