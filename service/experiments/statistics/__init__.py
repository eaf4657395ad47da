"""What an experiment may conclude: pure functions of sufficient statistics, without I/O and without a clock."""
