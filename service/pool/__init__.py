"""A pool of engines behind one front: who holds what, who gets which request, and what happens when one dies."""
