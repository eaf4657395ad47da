"""The CPU step: a whole forward in one native call, compiled by Numba, over a paged cache of its own layout."""
