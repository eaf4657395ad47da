"""The model: loading, the decoder, the paged KV pool, attention backends, runners and sampling."""
