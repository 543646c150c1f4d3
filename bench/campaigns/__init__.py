"""A world of NumPy for campaigns: it executes the files of a subject in place of a model and a server."""
