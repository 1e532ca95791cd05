"""Hooks for the programs in which people train. Each module imports the package that it is for."""
