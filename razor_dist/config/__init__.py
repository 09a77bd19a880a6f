"""Settings, the places they come from, sizes and errors."""
