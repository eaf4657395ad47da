"""Block pool, prefix index, block identity and the metadata store that engines share."""
