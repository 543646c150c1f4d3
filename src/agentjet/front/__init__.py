"""The front of a server: what a model call passes. HTTP entry, keys, dialects, prompts, calls. Imports no torch.

`inference` has the routes and `calls` the calls of a run. `server/` imports this package, and not the other way round:
`calls.Episodes` and `calls.Policies` say what a front needs of the server.
"""
