"""A rank's keys and values: pages, slots of streaming heads, and what accounts for them."""
