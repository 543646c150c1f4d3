"""The built-in recipes. The file `NAME.py` defines the recipe `NAME`."""
