"""Benchmarks. Each prints a table, then one JSON object as its last line.

A figure is always a ratio to a named baseline measured in the same run.
"""
