"""The processes that answer model calls instead of the server: `supervision` keeps them, `process` is one of them."""
