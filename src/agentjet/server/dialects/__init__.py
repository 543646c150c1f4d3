"""How agents' SDKs speak, one module a dialect: bodies to and from `gateway.requests`."""
