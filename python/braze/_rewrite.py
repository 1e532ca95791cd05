"""The names that pickles of models converted by version 0.1.0 load."""

from braze.convert.classes import new as _new  # noqa: F401

Plans = list
