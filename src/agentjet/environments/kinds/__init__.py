"""The built-in kinds, one library a module. None is imported before it is used."""
