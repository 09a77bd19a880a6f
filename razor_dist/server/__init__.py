"""HTTP: routes, server-sent events, access, metrics, and the page."""
