"""What both stages use: the cache's types and store, order and noise, records, errors."""
